// The names of cuSPARSE that torch's headers mention; nothing of it is called here.
#ifndef DDP_THIRD_PARTY_CUDA_OPAQUE_CUSPARSE_H_
#define DDP_THIRD_PARTY_CUDA_OPAQUE_CUSPARSE_H_

struct cusparseContext;
using cusparseHandle_t = cusparseContext*;
enum cusparseStatus_t : int { CUSPARSE_STATUS_SUCCESS = 0 };

#endif  // DDP_THIRD_PARTY_CUDA_OPAQUE_CUSPARSE_H_
