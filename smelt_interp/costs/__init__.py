"""What a network costs: budgets, matching, sparsity, serving."""
