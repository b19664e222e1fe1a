"""What a scored round teaches: the policy that is trained, and the algorithms that train it."""
