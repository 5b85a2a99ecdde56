"""Pass base class, pipelines, spec strings, reports, bisect."""
