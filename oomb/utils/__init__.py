"""General helpers that know nothing of oomb: units, files, dtypes, machine metrics."""
