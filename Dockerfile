# The keyphrase server on a CPU, with the default model:
#   docker build -t lexperts . && docker run --rm -p 127.0.0.1:8000:8000 lexperts
# Another model, and options of `lexperts keyphrases serve`:
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/my-model:/model:ro" lexperts /model --batch-size 32
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/lexperts
ENV PATH=/opt/lexperts/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
RUN pip install --extra-index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install -c constraints.txt ./lite '.[serve]' \
    && pip install --no-deps ./models/seke-minilm

FROM python:3.11-slim
COPY --from=build /opt/lexperts /opt/lexperts
RUN useradd --create-home --uid 1000 lexperts
USER 1000
WORKDIR /home/lexperts
ENV PATH=/opt/lexperts/bin:$PATH HF_HUB_OFFLINE=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["lexperts", "keyphrases", "serve", "--host", "0.0.0.0", "--port", "8000"]
