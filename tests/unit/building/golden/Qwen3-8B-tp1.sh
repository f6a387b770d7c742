# llm: checkpoint
python3 /app/examples/models/core/qwen/convert_checkpoint.py \
  --model_dir /models/Qwen3-8B \
  --output_dir /engines/Qwen3-8B-tp1-checkpoint \
  --dtype auto \
  --tp_size 1 \
  --workers 1
# llm: engine
trtllm-build \
  --checkpoint_dir /engines/Qwen3-8B-tp1-checkpoint \
  --output_dir /engines/Qwen3-8B-tp1 \
  --max_batch_size 32 \
  --max_input_len 8192 \
  --max_seq_len 8192 \
  --max_num_tokens 8192 \
  --kv_cache_type paged \
  --tokens_per_block 32 \
  --use_paged_context_fmha enable \
  --remove_input_padding enable \
  --gemm_plugin auto \
  --logits_dtype float32 \
  --workers 1 \
  --gather_generation_logits
