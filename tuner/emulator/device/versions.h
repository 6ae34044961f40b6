/* The versions that the stand-in libraries tell: build.py defines them as those of the packages
 * that PyTorch was installed with, since PyTorch compares some with what it was built for. */
#ifndef TUNER_VERSIONS_H
#define TUNER_VERSIONS_H

#ifndef EMU_CUDA_VERSION
#define EMU_CUDA_VERSION 13000 /* 1000 major + 10 minor */
#endif
#ifndef EMU_CUBLAS_VERSION
#define EMU_CUBLAS_VERSION 130101 /* 10000 major + 100 minor + patch */
#endif
#ifndef EMU_CUDNN_VERSION
#define EMU_CUDNN_VERSION 92000 /* 10000 major + 100 minor + patch */
#endif
#ifndef EMU_NCCL_VERSION
#define EMU_NCCL_VERSION 22907 /* 10000 major + 100 minor + patch */
#endif

#endif
