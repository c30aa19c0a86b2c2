"""Pages on which a person reads single episodes of a run, or single queries of a corpus."""
