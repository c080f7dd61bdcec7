"""What aiodist_vllm uses of vLLM, which is no part of the development environment."""
