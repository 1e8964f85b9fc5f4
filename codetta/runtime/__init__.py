"""What happens at run time: arguments are bound, kernels are found in the cache or built, and launched."""
