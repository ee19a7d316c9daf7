# The image of the operator, the gateway and the uninstall job: one static
# program, run as nobody.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -ldflags='-s -w' -o /fencedlease ./cmd/fencedlease

FROM gcr.io/distroless/static:nonroot
COPY --from=build /fencedlease /fencedlease
USER 65532:65532
ENTRYPOINT ["/fencedlease"]
