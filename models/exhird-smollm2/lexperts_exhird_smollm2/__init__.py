"""The default keyphrase generator of lexperts, without its backbone: `run_tools.packaged.find_packaged("exhird-smollm2")` is the whole."""
