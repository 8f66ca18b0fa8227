// The names of cuSOLVER that torch's headers mention; nothing of it is called here.
#ifndef DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVER_COMMON_H_
#define DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVER_COMMON_H_

enum cusolverStatus_t : int { CUSOLVER_STATUS_SUCCESS = 0 };

#endif  // DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVER_COMMON_H_
