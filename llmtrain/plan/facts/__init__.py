"""What a plan has to know about a model: its shapes, weights, vocabulary, and what is trained of it."""
