"""SmolLM2-135M-Instruct as a GGUF file, which `run_tools.packaged` unpacks."""
