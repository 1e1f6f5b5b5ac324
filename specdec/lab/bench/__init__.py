"""Speed and memory side by side: our engine, kernels and training steps against others."""
