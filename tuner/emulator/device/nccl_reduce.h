/* Sums, products, minima and maxima over small values of several ranks (part of nccl.c). */
#ifndef TUNER_NCCL_REDUCE_H
#define TUNER_NCCL_REDUCE_H

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3,
       FLOAT8_E5M2 };                                    /* ncclDataType_t */
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, OPERATIONS }; /* ncclRedOp_t */

static size_t type_bytes(int type) {
  static const uint8_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 0;
}

static int is_integer(int type) { return type >= INT8 && type <= UINT64; }

static float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static uint32_t to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static float from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float small = (float)fraction * 0x1p-24f;
  return sign ? -small : small;
}

/* Rounded to nearest, ties to even, as the device does. */
static uint16_t to_half(float f) {
  uint32_t bits = to_bits(f), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) /* below the smallest normal half */
    return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f)));
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

static uint16_t to_bfloat16(float f) {
  uint32_t bits = to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static int64_t read_integer(const void *p, int type) {
  switch (type) {
    case INT8: return *(const int8_t *)p;
    case UINT8: return *(const uint8_t *)p;
    case INT32: return *(const int32_t *)p;
    case UINT32: return *(const uint32_t *)p;
    default: return *(const int64_t *)p;
  }
}

static double read_float(const void *p, int type) {
  switch (type) {
    case FLOAT16: return from_half(*(const uint16_t *)p);
    case BFLOAT16: return from_bits((uint32_t)*(const uint16_t *)p << 16);
    case FLOAT32: return *(const float *)p;
    default: return *(const double *)p;
  }
}

static void write_float(void *p, int type, double value) {
  switch (type) {
    case FLOAT16: *(uint16_t *)p = to_half((float)value); break;
    case BFLOAT16: *(uint16_t *)p = to_bfloat16((float)value); break;
    case FLOAT32: *(float *)p = (float)value; break;
    default: *(double *)p = value; break;
  }
}

static int64_t join_integers(int64_t a, int64_t b, int operation, int type) {
  int less = type == UINT64 ? (uint64_t)b < (uint64_t)a : b < a;
  switch (operation) {
    case PRODUCT: return (int64_t)((uint64_t)a * (uint64_t)b);
    case MAXIMUM: return less ? a : b;
    case MINIMUM: return less ? b : a;
    default: return (int64_t)((uint64_t)a + (uint64_t)b);
  }
}

static double join_floats(double a, double b, int operation) {
  switch (operation) {
    case PRODUCT: return a * b;
    case MAXIMUM: return a > b ? a : b;
    case MINIMUM: return a < b ? a : b;
    default: return a + b;
  }
}

/* `from(rank)` lies at base + rank * stride. `factor`: what each value is multiplied with first. */
static void reduce(void *to, const char *base, size_t stride, uint32_t ranks, size_t count,
                   int type, int operation, double factor) {
  size_t bytes = type_bytes(type);
  if (type == FLOAT8_E4M3 || type == FLOAT8_E5M2) return; /* left as they are */
  for (size_t i = 0; i < count; i++) {
    const char *p = base + i * bytes;
    void *out = (char *)to + i * bytes;
    if (is_integer(type)) {
      int64_t n = read_integer(p, type);
      for (uint32_t r = 1; r < ranks; r++)
        n = join_integers(n, read_integer(p + r * stride, type), operation, type);
      if (operation == AVERAGE) n = type == UINT64 ? (int64_t)((uint64_t)n / ranks) : n / ranks;
      memcpy(out, &n, bytes); /* little endian, as all machines with CUDA are */
    } else {
      double x = read_float(p, type) * factor;
      for (uint32_t r = 1; r < ranks; r++)
        x = join_floats(x, read_float(p + r * stride, type) * factor, operation);
      write_float(out, type, operation == AVERAGE ? x / ranks : x);
    }
  }
}

#endif
