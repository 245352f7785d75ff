"""The server of `lexperts keyphrases serve` as a Ray Serve deployment: several replicas, on one machine or on a cluster.

    pip install --find-links dist "lexperts[serve]" "ray[serve]"
    python examples/serve_with_ray.py --replicas 2
    curl localhost:8000/keyphrases -H 'Content-Type: application/json' -d '{"inputs": "Graph cuts solve problems."}'

Each replica opens the model, and has its own queue and its own metrics. Ray distributes the requests.
"""

import argparse

from ray import serve


def deployment(model: str | None = None, replicas: int = 1, gpus: float = 0, max_queue: int = 128) -> serve.Application:
    """An application for `serve.run`."""

    def build_app():
        from transformers import pipeline

        import lexperts  # noqa: F401  (registers the pipeline)
        from lexperts_lite.serving import create_app

        return create_app(pipeline("keyphrase-extraction", model=model), max_queue=max_queue)

    options = {"num_replicas": replicas, "ray_actor_options": {"num_gpus": gpus}}
    # more than the queue holds, so that it is the app that refuses requests, with Retry-After
    replica = serve.deployment(
        serve.ingress(build_app)(), name="keyphrases", max_ongoing_requests=2 * max_queue, **options
    )
    return replica.bind()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or Hub id; by default the model of the package lexperts-seke-minilm")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per replica")
    options = parser.parse_args()
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(deployment(options.model, options.replicas, options.gpus), name="keyphrases", blocking=True)


if __name__ == "__main__":
    main()
