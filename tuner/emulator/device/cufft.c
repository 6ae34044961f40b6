/* cuFFT: the functions that PyTorch links. Transforms are noted and not computed.
 *
 * Signatures are those of cufft.h and cufftXt.h, CUDA 12.0 to 13.0. The workspace of a plan is not
 * published; assumed is one copy of what a transform works on.
 */
#include "device.h"

enum { SUCCESS = 0, INVALID_PLAN = 1, ALLOC_FAILED = 2, INVALID_VALUE = 4 }; /* cufftResult */
enum { MOST_PLANS = 1 << 16 };

/* Plans are numbers. */
struct plan {
  int taken;
  uint64_t elements, batches;
};

static struct plan plans[MOST_PLANS];

static struct plan *find(int number) {
  return number > 0 && number < MOST_PLANS && plans[number].taken ? &plans[number] : NULL;
}

EMU_EXPORT int cufftCreate(int *number) {
  if (!number) return INVALID_VALUE;
  for (int i = 1; i < MOST_PLANS; i++) {
    int is_free = 0;
    if (!__atomic_compare_exchange_n(&plans[i].taken, &is_free, 1, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
      continue;
    *number = i;
    return SUCCESS;
  }
  return ALLOC_FAILED;
}

EMU_EXPORT int cufftDestroy(int number) {
  struct plan *p = find(number);
  if (!p) return INVALID_PLAN;
  p->elements = p->batches = 0;
  __atomic_store_n(&p->taken, 0, __ATOMIC_RELEASE);
  return SUCCESS;
}

#define KEPT(name) \
  EMU_EXPORT int name(int number) { return find(number) ? SUCCESS : INVALID_PLAN; }
KEPT(cufftSetAutoAllocation)
KEPT(cufftSetStream)
KEPT(cufftSetWorkArea)

static int is_wide(int type) { return type == 1 || type == 5; } /* CUDA_R_64F, CUDA_C_64F */

EMU_EXPORT int cufftXtMakePlanMany(int number, int rank, const long long *sizes,
                                   const long long *input_sizes, long long input_stride,
                                   long long input_distance, int input_type,
                                   const long long *output_sizes, long long output_stride,
                                   long long output_distance, int output_type, long long batches,
                                   size_t *work, int type) {
  (void)input_sizes, (void)input_stride, (void)input_distance, (void)input_type;
  (void)output_sizes, (void)output_stride, (void)output_distance, (void)output_type;
  struct plan *p = find(number);
  if (!p) return INVALID_PLAN;
  if (rank < 1 || !sizes || !work) return INVALID_VALUE;
  p->elements = 1;
  p->batches = (uint64_t)batches;
  for (int i = 0; i < rank; i++) p->elements *= (uint64_t)sizes[i];
  *work = p->elements * p->batches * (is_wide(type) ? 16 : 8); /* complex numbers */
  return SUCCESS;
}

EMU_EXPORT int cufftXtExec(int number, const void *input, void *output, int direction) {
  (void)input, (void)output, (void)direction;
  const struct plan *p = find(number);
  if (!p) return INVALID_PLAN;
  emu_note_launch("cufftXtExec", (unsigned)p->elements, (unsigned)p->batches, 1, 1, 1, 1);
  return SUCCESS;
}
