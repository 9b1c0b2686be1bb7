"""Fine-tuning with Hugging Face Accelerate: one step, any machine."""

__version__ = "0.1.0"
