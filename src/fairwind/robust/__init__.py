"""Rounds with clients that lie: limits, robust sums, and the attacks that they are tried against."""
