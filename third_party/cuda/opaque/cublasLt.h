// The names of cuBLASLt that torch's headers mention; nothing of it is called here.
#ifndef DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLASLT_H_
#define DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLASLT_H_

struct cublasLtContext;
using cublasLtHandle_t = cublasLtContext*;

#endif  // DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLASLT_H_
