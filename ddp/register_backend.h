#ifndef DDP_REGISTER_BACKEND_H_
#define DDP_REGISTER_BACKEND_H_

#include <string>

#include "ddp/process_group.h"

namespace ddp {

// Gives a program's own backend a name, for ProcessGroupOptions::backend and DDP_BACKEND: groups
// with that name then connect with `maker`. As torch.distributed.Backend.register_backend(). A name
// of the library's, such as "gloo", then means `maker` too. Throws ConfigurationError when the name
// is empty or registered already, or `maker` is null. Thread-safe.
void register_backend(const std::string& name, BackendMaker maker);

}  // namespace ddp

#endif  // DDP_REGISTER_BACKEND_H_
