"""Where values, texts, pictures and the page go: TensorBoard, W&B, MLflow, Comet, any other logger.

Start with `destination`.
"""
