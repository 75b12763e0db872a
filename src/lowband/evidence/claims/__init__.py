"""config/claims.yaml and tables -> a verdict on each claim, and where its rows come from. Without torch."""
