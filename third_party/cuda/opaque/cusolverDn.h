// The names of cuSOLVER that torch's headers mention; nothing of it is called here.
#ifndef DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVERDN_H_
#define DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVERDN_H_

#include <cusolver_common.h>

struct cusolverDnContext;
using cusolverDnHandle_t = cusolverDnContext*;

#endif  // DDP_THIRD_PARTY_CUDA_OPAQUE_CUSOLVERDN_H_
