"""What is patched: the table of model families, and the mixins for their attention, models and configs."""
