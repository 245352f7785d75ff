"""The default definition model of lexperts, without its backbone: `run_tools.packaged.find_packaged("lexicon-smollm2")` is the whole."""
