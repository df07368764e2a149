"""Read and write topics with Spark: a PySpark data source, and pipelines on it. Needs the extra ``[spark]``.

    spark = segmentlog.spark.session()
    spark.read.format("segmentlog").option("path", "data").option("subscribe", "clicks").load()

`data_source` is the data source; `batch_reader`, `stream_reader` and `batch_writer` are its parts. `pipelines` are jobs
over whole topics.
"""

from segmentlog.spark.avro import from_avro as from_avro
from segmentlog.spark.foreach_batch import append_batches as append_batches
from segmentlog.spark.java import JavaNotFound as JavaNotFound
from segmentlog.spark.java import find_java as find_java
from segmentlog.spark.session import SparkNotInstalled as SparkNotInstalled
from segmentlog.spark.session import register as register
from segmentlog.spark.session import session as session
