"""Who began a failure, and why: from what was found to a verdict.

Values in, verdict out: no file, clock, store or network is touched here. The server hands in what it has collected of
a job, `trainmedic diagnose --dir` what lies in a folder, and both get the same verdict for the same facts.
"""
