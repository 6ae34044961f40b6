/* The functions of cuSOLVER that are told the types (part of cusolver.c). */
#ifndef TUNER_CUSOLVER_GENERIC_H
#define TUNER_CUSOLVER_GENERIC_H

EMU_EXPORT int cusolverDnXgeqrf_bufferSize(in h, in p, int64_t m, int64_t n, int ta, in a,
                                           int64_t lda, int tt, in tau, int tc, size_t *device,
                                           size_t *host) {
  (void)h, (void)p, (void)a, (void)lda, (void)tt, (void)tau, (void)tc;
  return bytes(m, n, 1, ta, device, host);
}

EMU_EXPORT int cusolverDnXgeqrf(in h, in p, int64_t m, int64_t n, int ta, out a, int64_t lda,
                                int tt, out tau, int tc, out device, size_t device_bytes, out host,
                                size_t host_bytes, int *info) {
  (void)h, (void)p, (void)ta, (void)a, (void)lda, (void)tt, (void)tau, (void)tc, (void)device;
  (void)device_bytes, (void)host, (void)host_bytes;
  return done("cusolverDnXgeqrf", m, n, n, 1, info);
}

EMU_EXPORT int cusolverDnXpotrf_bufferSize(in h, in p, int uplo, int64_t n, int ta, in a,
                                           int64_t lda, int tc, size_t *device, size_t *host) {
  (void)h, (void)p, (void)uplo, (void)a, (void)lda, (void)tc;
  return bytes(n, n, 1, ta, device, host);
}

EMU_EXPORT int cusolverDnXpotrf(in h, in p, int uplo, int64_t n, int ta, out a, int64_t lda, int tc,
                                out device, size_t device_bytes, out host, size_t host_bytes,
                                int *info) {
  (void)h, (void)p, (void)uplo, (void)ta, (void)a, (void)lda, (void)tc, (void)device;
  (void)device_bytes, (void)host, (void)host_bytes;
  return done("cusolverDnXpotrf", n, n, n, 1, info);
}

EMU_EXPORT int cusolverDnXpotrs(in h, in p, int uplo, int64_t n, int64_t columns, int ta, in a,
                                int64_t lda, int tb, out b, int64_t ldb, int *info) {
  (void)h, (void)p, (void)uplo, (void)ta, (void)a, (void)lda, (void)tb, (void)b, (void)ldb;
  return done("cusolverDnXpotrs", n, columns, n, 1, info);
}

EMU_EXPORT int cusolverDnXsyevd_bufferSize(in h, in p, int job, int uplo, int64_t n, int ta, in a,
                                           int64_t lda, int tw, in w, int tc, size_t *device,
                                           size_t *host) {
  (void)h, (void)p, (void)job, (void)uplo, (void)a, (void)lda, (void)tw, (void)w, (void)tc;
  return bytes(n, n, 1, ta, device, host);
}

EMU_EXPORT int cusolverDnXsyevd(in h, in p, int job, int uplo, int64_t n, int ta, out a,
                                int64_t lda, int tw, out w, int tc, out device,
                                size_t device_bytes, out host, size_t host_bytes, int *info) {
  (void)h, (void)p, (void)job, (void)uplo, (void)ta, (void)a, (void)lda, (void)tw, (void)w;
  (void)tc, (void)device, (void)device_bytes, (void)host, (void)host_bytes;
  return done("cusolverDnXsyevd", n, n, n, 1, info);
}

EMU_EXPORT int cusolverDnXsyevBatched_bufferSize(in h, in p, int job, int uplo, int64_t n, int ta,
                                                 in a, int64_t lda, int tw, in w, int tc,
                                                 size_t *device, size_t *host, int64_t batches) {
  (void)h, (void)p, (void)job, (void)uplo, (void)a, (void)lda, (void)tw, (void)w, (void)tc;
  return bytes(n, n, batches, ta, device, host);
}

EMU_EXPORT int cusolverDnXsyevBatched(in h, in p, int job, int uplo, int64_t n, int ta, out a,
                                      int64_t lda, int tw, out w, int tc, out device,
                                      size_t device_bytes, out host, size_t host_bytes, int *info,
                                      int64_t batches) {
  (void)h, (void)p, (void)job, (void)uplo, (void)ta, (void)a, (void)lda, (void)tw, (void)w;
  (void)tc, (void)device, (void)device_bytes, (void)host, (void)host_bytes;
  return done("cusolverDnXsyevBatched", n, n, n, batches, info);
}

EMU_EXPORT int cusolverDnXgeev_bufferSize(in h, in p, int jl, int jr, int64_t n, int ta, in a,
                                          int64_t lda, int tw, in w, int tl, in l, int64_t ldl,
                                          int tr, in r, int64_t ldr, int tc, size_t *device,
                                          size_t *host) {
  (void)h, (void)p, (void)jl, (void)jr, (void)a, (void)lda, (void)tw, (void)w, (void)tl, (void)l;
  (void)ldl, (void)tr, (void)r, (void)ldr, (void)tc;
  return bytes(n, n, 1, ta, device, host);
}

EMU_EXPORT int cusolverDnXgeev(in h, in p, int jl, int jr, int64_t n, int ta, out a, int64_t lda,
                               int tw, out w, int tl, out l, int64_t ldl, int tr, out r,
                               int64_t ldr, int tc, out device, size_t device_bytes, out host,
                               size_t host_bytes, int *info) {
  (void)h, (void)p, (void)jl, (void)jr, (void)ta, (void)a, (void)lda, (void)tw, (void)w, (void)tl;
  (void)l, (void)ldl, (void)tr, (void)r, (void)ldr, (void)tc, (void)device, (void)device_bytes;
  (void)host, (void)host_bytes;
  return done("cusolverDnXgeev", n, n, n, 1, info);
}

EMU_EXPORT int cusolverDnXsytrs_bufferSize(in h, int uplo, int64_t n, int64_t columns, int ta, in a,
                                           int64_t lda, in pivots, int tb, in b, int64_t ldb,
                                           size_t *device, size_t *host) {
  (void)h, (void)uplo, (void)a, (void)lda, (void)pivots, (void)tb, (void)b, (void)ldb;
  return bytes(n, columns, 1, ta, device, host);
}

EMU_EXPORT int cusolverDnXsytrs(in h, int uplo, int64_t n, int64_t columns, int ta, in a,
                                int64_t lda, in pivots, int tb, out b, int64_t ldb, out device,
                                size_t device_bytes, out host, size_t host_bytes, int *info) {
  (void)h, (void)uplo, (void)ta, (void)a, (void)lda, (void)pivots, (void)tb, (void)b, (void)ldb;
  (void)device, (void)device_bytes, (void)host, (void)host_bytes;
  return done("cusolverDnXsytrs", n, columns, n, 1, info);
}

#endif
