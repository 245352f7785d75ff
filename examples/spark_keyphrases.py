"""Keyphrases of Parquet files by Spark.

    pip install "lexperts[spark]"    # and a Java runtime: apt-get install default-jre-headless
    python examples/spark_keyphrases.py documents.parquet keyphrases --master "local[2]"

A Python worker of Spark loads the model once. Documents that cannot be processed have a reason in the column `error`.
"""

import argparse
from collections.abc import Iterator

import pyarrow
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from keyphrase_tools.extractor import KeyphraseExtractor


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet files with the columns text, title and id")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--model", help="folder or Hub id, or tiny; by default lexperts-seke-minilm")
    parser.add_argument("--master", default="local[2]", help="of Spark")
    parser.add_argument("--partitions", type=int, help="that the rows are dealt to; by default four per core")
    args = parser.parse_args(argv)

    # a batch of 512 documents is sorted by length and read together
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "512", "spark.python.worker.reuse": "true"}
    spark = SparkSession.builder.master(args.master).config(map=settings).getOrCreate()
    extract = KeyphraseExtractor(args.model, title_column="title", columns=["id"], top_k=10)
    schema = from_arrow_schema(pyarrow.schema([("id", pyarrow.string()), *extract.types().items()]))

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            yield from extract(pyarrow.Table.from_batches([batch])).to_batches()

    documents = spark.read.parquet(args.source).selectExpr("string(id) as id", "title", "text")
    # else one core reads a whole row group, which is often the whole file; the shuffle is cheap beside the model
    documents = documents.repartition(args.partitions or 4 * spark.sparkContext.defaultParallelism)
    documents.mapInArrow(run, schema).write.mode("errorifexists").parquet(args.output)
    spark.stop()


if __name__ == "__main__":
    main()
