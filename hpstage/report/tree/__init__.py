"""The interactive stage tree: one component for the report, notebooks and pages that Bokeh serves."""
