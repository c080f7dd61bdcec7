"""all_reduce of CUDA tensors, several processes on one GPU, beside Gloo and the device's copies."""
