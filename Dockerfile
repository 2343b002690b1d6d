# The image of Tidegate: `docker build -t tidegate:0.1.0 .`; docs/deployment.md says how to pin what it is built by, and how
# to build the same without Docker.
ARG BUILDER=rust:1.95-bookworm

FROM ${BUILDER} AS build
WORKDIR /build
COPY Cargo.toml Cargo.lock build.rs ./
COPY proto proto
COPY src src
RUN cargo build --release --locked --bin tidegate
# All that is in the image: the program under both its names, for gateways start the reference as /bin/ratelimit, with no
# argument, and under that name Tidegate serves; the libraries that it is linked to; and authorities for Redis under TLS.
RUN mkdir -p /out/bin && cp target/release/tidegate /out/bin/tidegate && ln -s tidegate /out/bin/ratelimit \
    && ldd /out/bin/tidegate | grep -o '/[^ ]*' | xargs -n 1 -I '{}' cp -L --parents '{}' /out \
    && cp -L --parents /etc/ssl/certs/ca-certificates.crt /out

FROM scratch
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tidegate" \
      org.opencontainers.image.description="A rate limit decision service for Envoy, API gateways and microservices" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/ /
# A number, so that Kubernetes can tell that it is not root. Nothing is ever written.
USER 65532:65532
# gRPC, and HTTP: /healthcheck, /json, /metrics.
EXPOSE 8081 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["/bin/tidegate"]
CMD ["serve"]
