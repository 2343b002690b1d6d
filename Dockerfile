# The image of Tidegate: `docker build -t tidegate:0.1.0 .`; docs/deployment.md says how to pin what it is built from, and how
# to build the same without Docker.
ARG BUILDER=rust:1.95-bookworm
# glibc, libgcc and a CA bundle of Debian 12, no shell; of the same Debian as the builder, for its glibc.
ARG RUNTIME=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILDER} AS build
WORKDIR /build
COPY Cargo.toml Cargo.lock build.rs ./
COPY proto proto
COPY src src
RUN cargo build --release --locked --bin tidegate
# Gateways start the reference as /bin/ratelimit, with no argument; under that name Tidegate serves.
RUN mkdir /out && cp target/release/tidegate /out/tidegate && ln -s tidegate /out/ratelimit

FROM ${RUNTIME}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tidegate" \
      org.opencontainers.image.description="A rate limit decision service for Envoy, API gateways and microservices" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
# For Redis under TLS, whichever image this stage begins with.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/ /bin/
# A number, so that Kubernetes can tell that it is not root. Nothing is ever written.
USER 65532:65532
# gRPC, and HTTP: /healthcheck, /json, /metrics.
EXPOSE 8081 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["/bin/tidegate"]
CMD ["serve"]
