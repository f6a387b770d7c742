# llm: checkpoint
python3 /app/examples/quantization/quantize.py \
  --model_dir /models/Qwen3-32B \
  --output_dir /engines/Qwen3-32B-tp8-checkpoint \
  --dtype bfloat16 \
  --qformat fp8 \
  --kv_cache_dtype fp8 \
  --tp_size 8
# llm: engine
trtllm-build \
  --checkpoint_dir /engines/Qwen3-32B-tp8-checkpoint \
  --output_dir /engines/Qwen3-32B-tp8 \
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
  --workers 8 \
  --use_fp8_context_fmha enable
