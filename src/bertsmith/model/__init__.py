"""What BERT is: configuration, encoder, heads, and the names its weights bear elsewhere; knows model folders only."""
