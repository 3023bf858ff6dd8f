"""After training: a trained model as a module, its outputs, its scores on clients' samples, and its files."""
