#ifndef DDP_TESTING_ACCELERATOR_DEVICE_OPERATORS_H_
#define DDP_TESTING_ACCELERATOR_DEVICE_OPERATORS_H_

namespace ddp::testing {

// Registers the operators of the device, for the life of the process: allocation, views, copies
// and record_stream as the device's own; RunOnDevice() for all others. Call it once.
void RegisterDeviceOperators();

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_DEVICE_OPERATORS_H_
