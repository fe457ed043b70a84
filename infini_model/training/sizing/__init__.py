"""What a training needs before it starts: the shape of its model, and its memory."""
