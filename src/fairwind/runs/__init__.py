"""What a run is made of, and how it is kept: recipes, directories, results."""
