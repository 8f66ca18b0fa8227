// The names of cuBLAS that torch's headers mention; nothing of it is called here.
#ifndef DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLAS_V2_H_
#define DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLAS_V2_H_

struct cublasContext;
using cublasHandle_t = cublasContext*;
enum cublasStatus_t : int { CUBLAS_STATUS_SUCCESS = 0 };

#endif  // DDP_THIRD_PARTY_CUDA_OPAQUE_CUBLAS_V2_H_
