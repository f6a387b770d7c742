# llm: checkpoint
python3 /app/examples/models/core/qwen/convert_checkpoint.py \
  --model_dir /models/Qwen3-32B \
  --output_dir /engines/Qwen3-32B-tp2-checkpoint \
  --dtype auto \
  --tp_size 2 \
  --workers 2
# llm: engine
trtllm-build \
  --checkpoint_dir /engines/Qwen3-32B-tp2-checkpoint \
  --output_dir /engines/Qwen3-32B-tp2 \
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
  --workers 2 \
  --gather_generation_logits
