"""What the commands of ``hf-poslsh`` do. Each returns plain data and has a function that puts the data in words."""
