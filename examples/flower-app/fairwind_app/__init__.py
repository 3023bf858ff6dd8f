"""A task of Fairwind's on Flower."""
