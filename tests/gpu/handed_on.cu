// Half of a block's threads hand numbers in shared memory to the others, across an mbarrier. Either each of them arrives
// there, or they meet, and one arrives for all: `handed_on each` and `handed_on one`. Both are right.

#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int COUNT = 128;

__device__ uint32_t address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

template <bool ONE_ARRIVES>
__global__ void hand_on(int* out) {
  __shared__ int numbers[COUNT];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(ONE_ARRIVES ? 1 : COUNT));
  }
  __syncthreads();
  if (threadIdx.x < COUNT) {
    numbers[threadIdx.x] = threadIdx.x + 1;
    if (ONE_ARRIVES) asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
    if (!ONE_ARRIVES || threadIdx.x == 0) {
      asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address(&barrier)) : "memory");
    }
  } else {
    asm volatile(
        "{ .reg .pred done; WAIT%=: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra WAIT%=; }" ::"r"(
            address(&barrier))
        : "memory");
    out[threadIdx.x - COUNT] = numbers[(threadIdx.x + 37) % COUNT];
  }
}

int main(int, char** arguments) {
  int numbers[COUNT], sum = 0, *out = nullptr;
  cudaMalloc(&out, sizeof(numbers));
  if (std::strcmp(arguments[1], "one") == 0) {
    hand_on<true><<<1, 2 * COUNT>>>(out);
  } else {
    hand_on<false><<<1, 2 * COUNT>>>(out);
  }
  cudaMemcpy(numbers, out, sizeof(numbers), cudaMemcpyDeviceToHost);
  for (int number : numbers) sum += number;
  std::printf("%s, sum %d\n", cudaGetErrorString(cudaGetLastError()), sum);
}
