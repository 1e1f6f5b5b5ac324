"""The Triton kernels of the operators, imported on first use: Triton exists on Linux only and takes 0.5 s to import."""
