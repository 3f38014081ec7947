// The machine under both executors: every thread of a CUDA block is a fiber (README.md).
//
//   1  fibers and the scheduler          who runs, and until where
//   2  block barriers
//   3  warp instructions                 shuffles, votes, ldmatrix, mma.sync: done once all lanes of the mask are there
//   4  cp.async                          copies that happen when they are waited for, not before
//   5  instructions of one thread        ptx_<opcode>(in, out): registers as 64-bit words
//   6  special registers and llvm.nvvm.* functions of NVVM IR, under their own names without "llvm."
//   7  memory: guarded arrays, shared memory, the log of accesses
//   8  launch
//
// A kernel that breaks a rule ends the launch: run_launch returns nonzero and run_error() says what, where, who.
#define _GNU_SOURCE
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

typedef uint32_t u32;
typedef uint64_t u64;

enum { MAX_THREADS = 1024, STACK_BYTES = 256 * 1024, MAX_COPIES = 64, LANES = 32 };

// ---------------------------------------------------------------- 1  fibers and the scheduler

enum state { READY, AT_BARRIER, AT_WARP, EXITED };

typedef struct {
  int tid[3], number, lane, warp, is_started;
  enum state state;
  int op;             // the warp instruction it waits at
  u32 mask;           // and the lanes that take part
  u64 in[16], out[8]; // its operands
  struct { char *to; const char *from; int bytes, group; } copies[MAX_COPIES];
  int n_copies, group;
  long executed; // instructions, where they are counted
  jmp_buf here;
  ucontext_t first;
  char *stack;
} fiber;

static fiber fibers[MAX_THREADS], *me;
static jmp_buf scheduler;
static sigjmp_buf failed;
static int n_threads, n_live;
static int block[3], block_size[3], grid_size[3];
static int dynamic_bytes;
static void (*entry)(void *);
static void *arguments;
static char error[512];
static volatile int is_running;

static void fail(const char *format, ...) {
  char what[256];
  va_list rest;
  va_start(rest, format);
  vsnprintf(what, sizeof what, format, rest);
  va_end(rest);
  snprintf(error, sizeof error, "block (%d,%d,%d) thread (%d,%d,%d): %s", block[0], block[1], block[2],
           me->tid[0], me->tid[1], me->tid[2], what);
  siglongjmp(failed, 1);
}

static void on_fault(int number, siginfo_t *info, void *context) {
  if (!is_running || !me) { // not a kernel's
    signal(number, SIG_DFL);
    return;
  }
  fail("access to memory that is no part of an array, at %p", info->si_addr);
}

static void switch_to(fiber *f) {
  me = f;
  if (_setjmp(scheduler)) return;
  if (!f->is_started) {
    f->is_started = 1;
    setcontext(&f->first);
  }
  _longjmp(f->here, 1);
}

static void wait_for_others(void) {
  if (_setjmp(me->here) == 0) _longjmp(scheduler, 1);
}

static void fiber_main(void) { // one pass for each block of the grid
  for (;;) {
    entry(arguments);
    me->state = EXITED;
    n_live--;
    wait_for_others();
  }
}

// ---------------------------------------------------------------- 2  block barriers

enum { COUNT, AND, OR };
static int n_at_barrier, combined, combined_result, combining;

static void release_barrier(void) {
  combined_result = combined;
  n_at_barrier = 0;
  for (int i = 0; i < n_threads; i++)
    if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

void run_barrier(void) {
  me->state = AT_BARRIER;
  if (++n_at_barrier == n_threads) release_barrier();
  else wait_for_others();
}

int run_barrier_reduce(int how, int value) {
  if (n_at_barrier == 0) {
    combining = how;
    combined = how == AND;
  }
  if (combining != how) fail("threads wait at different kinds of syncthreads");
  if (how == COUNT) combined += value != 0;
  else if (how == AND) combined &= value != 0;
  else combined |= value != 0;
  run_barrier();
  return combined_result;
}

// ---------------------------------------------------------------- 3  warp instructions

enum { SHUFFLE = 1, VOTE, SYNC, MATCH, LDMATRIX, MMA_S8, MMA_F16, MMA_BF16, MMA_S8_SHORT };
enum { IDX, UP, DOWN, BUTTERFLY };
enum { ALL, ANY, UNIFORM, BALLOT };

static float as_float(u64 bits) {
  u32 low = bits;
  float f;
  memcpy(&f, &low, 4);
  return f;
}
static u64 as_bits(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}
static float from_half(uint16_t bits) {
  _Float16 h;
  memcpy(&h, &bits, 2);
  return h;
}
static uint16_t to_half(float f) {
  _Float16 h = f;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
static float from_bfloat(uint16_t bits) { return as_float((u64)bits << 16); }
static uint16_t to_bfloat(float f) {
  u32 bits = as_bits(f);
  if (f != f) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void shuffle(fiber *warp, int n, u32 mask) {
  for (int l = 0; l < n; l++) {
    if (!(mask >> l & 1)) continue;
    int mode = warp[l].in[0], by = warp[l].in[2] & 31, c = warp[l].in[3];
    int segment = c >> 8 & 31, clamp = c & 31;
    int highest = (l & segment) | (clamp & ~segment), lowest = l & segment, source, is_inside;
    if (mode == IDX) source = lowest | (by & ~segment), is_inside = source <= highest;
    else if (mode == UP) source = l - by, is_inside = source >= highest;
    else if (mode == DOWN) source = l + by, is_inside = source <= highest;
    else source = l ^ by, is_inside = source <= highest;
    if (!is_inside) source = l;
    int takes_part = source < n && mask >> source & 1;
    warp[l].out[0] = takes_part ? (u32)warp[source].in[1] : 0xffffffff; // undefined on the device: a NaN
    warp[l].out[1] = is_inside;
  }
}

static void vote(fiber *warp, int n, u32 mask) {
  u32 ballot = 0, present = n == LANES ? mask : mask & ((1u << n) - 1);
  for (int l = 0; l < n; l++)
    if (mask >> l & 1 && warp[l].in[1]) ballot |= 1u << l;
  for (int l = 0; l < n; l++) {
    int mode = warp[l].in[0];
    warp[l].out[0] = ballot;
    warp[l].out[1] = mode == ALL ? ballot == present : mode == ANY ? ballot != 0
                     : mode == UNIFORM ? ballot == present || ballot == 0 : 0;
  }
}

static void match(fiber *warp, int n, u32 mask) {
  for (int l = 0; l < n; l++) {
    u32 same = 0;
    for (int other = 0; other < n; other++)
      if (mask >> other & 1 && warp[other].in[0] == warp[l].in[0]) same |= 1u << other;
    warp[l].out[0] = same;
  }
}

// 8x8 matrices of 16-bit numbers; lane 8m + i gives the address of row i of matrix m.
static void ldmatrix(fiber *warp) {
  int count = warp[0].in[1], is_transposed = warp[0].in[2];
  for (int l = 0; l < LANES; l++)
    for (int m = 0; m < count; m++) {
      int row = l >> 2, column = 2 * (l & 3);
      uint16_t pair[2];
      for (int i = 0; i < 2; i++) {
        int r = is_transposed ? column + i : row, c = is_transposed ? row : column + i;
        pair[i] = ((const uint16_t *)(uintptr_t)(u32)warp[8 * m + r].in[0])[c];
      }
      warp[l].out[m] = pair[0] | (u32)pair[1] << 16;
    }
}

// m16n8k32 of int8 and m16n8k16 of 16-bit floats: the fragment layouts of the PTX manual.
static void mma(fiber *warp, int op) {
  int per_word = op == MMA_S8 ? 4 : 2, K = 8 * per_word;
  double a[16][32], b[32][8];
  for (int l = 0; l < LANES; l++) {
    int group = l >> 2, t = l & 3;
    for (int r = 0; r < 6; r++)
      for (int j = 0; j < per_word; j++) {
        u32 word = warp[l].in[r];
        uint16_t half = word >> (16 * j);
        double value = op == MMA_S8 ? (int8_t)(word >> 8 * j) : op == MMA_F16 ? from_half(half) : from_bfloat(half);
        int k = t * per_word + j;
        if (r < 4) a[group + 8 * (r & 1)][k + K / 2 * (r >> 1)] = value;
        else b[k + K / 2 * (r - 4)][group] = value;
      }
  }
  for (int l = 0; l < LANES; l++)
    for (int r = 0; r < 4; r++) {
      int row = (l >> 2) + 8 * (r >> 1), column = 2 * (l & 3) + (r & 1);
      double sum = 0;
      for (int k = 0; k < K; k++) sum += a[row][k] * b[k][column];
      u64 c = warp[l].in[6 + r];
      warp[l].out[r] = op == MMA_S8 ? (u32)c + (u32)(int32_t)sum : as_bits(as_float(c) + sum);
    }
}

// m16n8k16 of int8: a has two words, b one.
static void short_mma(fiber *warp) {
  int8_t a[16][16], b[16][8];
  for (int l = 0; l < LANES; l++)
    for (int j = 0; j < 4; j++) {
      int group = l >> 2, k = (l & 3) * 4 + j;
      a[group][k] = warp[l].in[0] >> 8 * j, a[group + 8][k] = warp[l].in[1] >> 8 * j;
      b[k][group] = warp[l].in[2] >> 8 * j;
    }
  for (int l = 0; l < LANES; l++)
    for (int r = 0; r < 4; r++) {
      u32 sum = warp[l].in[3 + r];
      for (int k = 0; k < 16; k++) sum += (u32)(a[(l >> 2) + 8 * (r >> 1)][k] * b[k][2 * (l & 3) + (r & 1)]);
      warp[l].out[r] = sum;
    }
}

// Waits for the other lanes of the mask; the last one computes for all.
static void together(int op, u32 mask) {
  fiber *warp = &fibers[me->warp * LANES];
  int n = n_threads - me->warp * LANES;
  if (n > LANES) n = LANES;
  if (!(mask >> me->lane & 1)) fail("warp instruction whose mask %08x does not have the calling lane", mask);
  if (op >= LDMATRIX && n < LANES) fail("ldmatrix or mma in a warp of %d threads", n);
  if (op == LDMATRIX && me->in[0] & 15) fail("ldmatrix: address is no multiple of 16");
  me->state = AT_WARP;
  me->op = op;
  me->mask = mask;
  for (int l = 0; l < n; l++) {
    if (!(mask >> l & 1)) continue;
    if (warp[l].state == EXITED) fail("warp instruction waits for lane %d, which has exited", l);
    if (warp[l].state != AT_WARP) {
      wait_for_others();
      return;
    }
    if (warp[l].op != op || warp[l].mask != mask) fail("divergence: lane %d waits at another warp instruction", l);
  }
  if (op == SHUFFLE) shuffle(warp, n, mask);
  else if (op == VOTE) vote(warp, n, mask);
  else if (op == MATCH) match(warp, n, mask);
  else if (op == LDMATRIX) ldmatrix(warp);
  else if (op == MMA_S8_SHORT) short_mma(warp);
  else if (op != SYNC) mma(warp, op);
  for (int l = 0; l < n; l++)
    if (mask >> l & 1) warp[l].state = READY;
}

// As LLVM returns {i32, i1}: two registers.
typedef struct { u64 value, flag; } two;

two run_shuffle(u32 mask, int mode, u32 value, u32 by, u32 clamp) {
  me->in[0] = mode, me->in[1] = value, me->in[2] = by, me->in[3] = clamp;
  together(SHUFFLE, mask);
  return (two){me->out[0], me->out[1]};
}
two run_vote(u32 mask, int mode, int flag) {
  me->in[0] = mode, me->in[1] = flag & 1;
  together(VOTE, mask);
  return (two){me->out[0], me->out[1]};
}
u32 run_match(u32 mask, u64 value) {
  me->in[0] = value;
  together(MATCH, mask);
  return me->out[0];
}
void run_sync_warp(u32 mask) { together(SYNC, mask); }

// ---------------------------------------------------------------- 4  cp.async

#define PTX(name) void ptx_##name(const u64 *in, u64 *out)

void run_misaligned(u64 at, int bytes) { fail("access of %d bytes at %#lx, which is no multiple", bytes, (long)at); }
static void aligned(u64 at, int bytes) {
  if (at % bytes) run_misaligned(at, bytes);
}

PTX(cp_async_cg_shared_global) { // [to], [from], bytes
  u64 to = (u32)in[0];
  int bytes = in[2];
  aligned(to, bytes), aligned(in[1], bytes);
  if (me->n_copies == MAX_COPIES) fail("more than %d cp.async in flight (a limit of this runtime)", MAX_COPIES);
  memset((char *)to, 0xff, bytes); // NaN until it has been waited for
  me->copies[me->n_copies].to = (char *)to;
  me->copies[me->n_copies].from = (const char *)in[1];
  me->copies[me->n_copies].bytes = bytes;
  me->copies[me->n_copies++].group = me->group;
}
PTX(cp_async_commit_group) { me->group++; }
PTX(cp_async_wait_group) { // n: all but the last n groups are done
  int left = 0;
  for (int i = 0; i < me->n_copies; i++)
    if (me->copies[i].group < me->group - (int)in[0]) memcpy(me->copies[i].to, me->copies[i].from, me->copies[i].bytes);
    else me->copies[left++] = me->copies[i];
  me->n_copies = left;
}

// ---------------------------------------------------------------- 5  instructions of one thread

PTX(dp4a_s32_s32) {
  u32 sum = in[2];
  for (int i = 0; i < 32; i += 8) sum += (u32)((int8_t)(in[0] >> i) * (int8_t)(in[1] >> i));
  out[0] = sum;
}

PTX(mad_wide_s32) { out[0] = (int64_t)(int32_t)in[0] * (int32_t)in[1] + in[2]; }
PTX(lop3_b32) { // bit 4x + 2y + z of the table
  u32 x = in[0], y = in[1], z = in[2], result = 0;
  for (int i = 0; i < 8; i++)
    if (in[3] >> i & 1) result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
  out[0] = result;
}

static void load(const u64 *in, u64 *out, int n) {
  aligned(in[0], 4 * n);
  for (int i = 0; i < n; i++) out[i] = ((const u32 *)in[0])[i];
}
PTX(ld_global_u32) { load(in, out, 1); }
PTX(ld_global_v2_u32) { load(in, out, 2); }
static void load_half(const u64 *in, u64 *out) {
  aligned(in[0], 2);
  out[0] = *(const uint16_t *)in[0];
}
PTX(ld_global_nc_L1_no_allocate_u16) { load_half(in, out); }
PTX(ld_global_nc_u16) { load_half(in, out); }
PTX(ld_global_nc_u32) { load(in, out, 1); }
PTX(ld_global_nc_v2_u32) { load(in, out, 2); }
PTX(ld_global_nc_v4_u32) { load(in, out, 4); }
PTX(ld_global_nc_L1_no_allocate_u32) { load(in, out, 1); }
PTX(ld_global_nc_L1_no_allocate_v2_u32) { load(in, out, 2); }
PTX(ld_global_nc_L1_no_allocate_v4_u32) { load(in, out, 4); }
PTX(ld_global_v4_u32) { load(in, out, 4); }
static long n_prefetched; // bytes
long run_prefetched_so_far(void) { return n_prefetched; }
static u64 *prefetches; // address, bytes of each
static long n_prefetches, most_prefetches;
void run_log_prefetches(void *buffer, long capacity) {
  prefetches = buffer, most_prefetches = capacity, n_prefetches = 0;
}
long run_prefetches(void) { return n_prefetches; }
PTX(cp_async_bulk_prefetch_L2_global) { // [from], bytes: both multiples of 16, all of it readable
  aligned(in[0], 16), aligned((u32)in[1], 16);
  for (u32 i = 0; i < (u32)in[1]; i += 4) (void)*(const volatile u32 *)(in[0] + i);
  n_prefetched += (u32)in[1];
  if (n_prefetches < most_prefetches) {
    prefetches[2 * n_prefetches] = in[0];
    prefetches[2 * n_prefetches + 1] = (u32)in[1];
  }
  n_prefetches++;
}
PTX(griddepcontrol_wait) {} // here kernels run one after the other
PTX(griddepcontrol_launch_dependents) {}
static void load_shared(const u64 *in, u64 *out, int n) {
  u64 at = (u32)in[0];
  load(&at, out, n);
}
PTX(ld_shared_u32) { load_shared(in, out, 1); }
PTX(ld_shared_v2_u32) { load_shared(in, out, 2); }
PTX(ld_shared_v4_u32) { load_shared(in, out, 4); }
PTX(ld_shared_v2_u64) {
  aligned((u32)in[0], 16);
  memcpy(out, (void *)(u64)(u32)in[0], 16);
}

static void store(u64 at, const u64 *words, int n) { // [to], words
  aligned(at, 4 * n);
  for (int i = 0; i < n; i++) ((u32 *)at)[i] = words[i];
}
PTX(st_global_u32) { store(in[0], in + 1, 1); }
PTX(st_global_v2_u32) { store(in[0], in + 1, 2); }
PTX(st_global_v4_u32) { store(in[0], in + 1, 4); }
PTX(st_shared_u32) { store((u32)in[0], in + 1, 1); }
PTX(st_shared_v2_u32) { store((u32)in[0], in + 1, 2); }
PTX(st_shared_v4_u32) { store((u32)in[0], in + 1, 4); }
PTX(st_shared_v2_u64) {
  aligned((u32)in[0], 16);
  memcpy((void *)(u64)(u32)in[0], in + 1, 16);
}
PTX(mov_b32) { out[0] = (u32)in[0]; }

static void load_matrix(const u64 *in, u64 *out, int count, int is_transposed) {
  me->in[0] = in[0], me->in[1] = count, me->in[2] = is_transposed;
  together(LDMATRIX, ~0u);
  memcpy(out, me->out, count * sizeof *out);
}
PTX(ldmatrix_sync_aligned_m8n8_x4_shared_b16) { load_matrix(in, out, 4, 0); }
PTX(ldmatrix_sync_aligned_m8n8_x2_shared_b16) { load_matrix(in, out, 2, 0); }
PTX(ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16) { load_matrix(in, out, 4, 1); }
PTX(ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16) { load_matrix(in, out, 2, 1); }

static void multiply(const u64 *in, u64 *out, int op) {
  memcpy(me->in, in, 10 * sizeof *in);
  together(op, ~0u);
  memcpy(out, me->out, 4 * sizeof *out);
}
PTX(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32) { multiply(in, out, MMA_S8); }
PTX(mma_sync_aligned_m16n8k16_row_col_s32_s8_s8_s32) {
  memcpy(me->in, in, 7 * sizeof *in);
  together(MMA_S8_SHORT, ~0u);
  memcpy(out, me->out, 4 * sizeof *out);
}
PTX(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32) { multiply(in, out, MMA_F16); }
PTX(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32) { multiply(in, out, MMA_BF16); }

PTX(cvt_rn_bf16x2_f32) { out[0] = (u32)to_bfloat(as_float(in[0])) << 16 | to_bfloat(as_float(in[1])); }
PTX(cvt_rn_f16x2_f32) { out[0] = (u32)to_half(as_float(in[0])) << 16 | to_half(as_float(in[1])); }
PTX(cvt_f32_f16) { out[0] = as_bits(from_half(in[0])); }
PTX(cvt_rn_f16_f32) { out[0] = to_half(as_float(in[0])); }
PTX(cvt_rni_s32_f32) { // saturating; NaN is 0
  float f = rintf(as_float(in[0]));
  out[0] = f != f ? 0 : f >= 0x1p31f ? 0x7fffffff : f < -0x1p31f ? 0x80000000 : (u32)(int32_t)f;
}
PTX(mul_rn_f32) { out[0] = as_bits(as_float(in[0]) * as_float(in[1])); }
PTX(add_rn_f32) { out[0] = as_bits(as_float(in[0]) + as_float(in[1])); }
PTX(fma_rn_f32) { out[0] = as_bits(fmaf(as_float(in[0]), as_float(in[1]), as_float(in[2]))); }
PTX(fma_rm_f32) { // rounded down
  volatile float x = as_float(in[0]), y = as_float(in[1]), z = as_float(in[2]), result;
  fesetround(FE_DOWNWARD);
  result = fmaf(x, y, z);
  fesetround(FE_TONEAREST);
  out[0] = as_bits(result);
}
static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
PTX(ex2_approx_ftz_f32) { out[0] = as_bits(flushed(exp2f(flushed(as_float(in[0]))))); }
PTX(tanh_approx_f32) { out[0] = as_bits(tanhf(as_float(in[0]))); }
PTX(prmt_b32) {
  u64 bytes = (u32)in[0] | in[1] << 32;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    int choice = in[2] >> 4 * i & 15;
    uint8_t byte = bytes >> 8 * (choice & 7);
    if (choice & 8) byte = (int8_t)byte < 0 ? 255 : 0;
    result |= (u32)byte << 8 * i;
  }
  out[0] = result;
}

// ---------------------------------------------------------------- 6  special registers, llvm.nvvm.*

int run_tid(int axis) { return me->tid[axis]; }
int run_ctaid(int axis) { return block[axis]; }
int run_ntid(int axis) { return block_size[axis]; }
int run_nctaid(int axis) { return grid_size[axis]; }
int run_laneid(void) { return me->lane; }
int run_dynamic_bytes(void) { return dynamic_bytes; }

#define NVVM(type, id, name, parameters, body) \
  type id parameters __asm__("nvvm." name);    \
  type id parameters body
#define AXES(what)                                                                         \
  NVVM(int, sreg_##what##_x, "read.ptx.sreg." #what ".x", (void), { return run_##what(0); }) \
  NVVM(int, sreg_##what##_y, "read.ptx.sreg." #what ".y", (void), { return run_##what(1); }) \
  NVVM(int, sreg_##what##_z, "read.ptx.sreg." #what ".z", (void), { return run_##what(2); })
AXES(tid)
AXES(ctaid)
AXES(ntid)
AXES(nctaid)
NVVM(int, sreg_laneid, "read.ptx.sreg.laneid", (void), { return me->lane; })
NVVM(int, sreg_warpsize, "read.ptx.sreg.warpsize", (void), { return LANES; })
NVVM(void, nvvm_barrier, "barrier0", (void), { run_barrier(); })
NVVM(int, nvvm_barrier_count, "barrier0.popc", (int v), { return run_barrier_reduce(COUNT, v); })
NVVM(int, nvvm_barrier_and, "barrier0.and", (int v), { return run_barrier_reduce(AND, v); })
NVVM(int, nvvm_barrier_or, "barrier0.or", (int v), { return run_barrier_reduce(OR, v); })
NVVM(void, nvvm_sync_warp, "bar.warp.sync", (u32 mask), { run_sync_warp(mask); })
NVVM(two, nvvm_shuffle, "shfl.sync.i32", (u32 mask, int mode, u32 v, u32 by, u32 clamp),
     { return run_shuffle(mask, mode, v, by, clamp); })
NVVM(two, nvvm_vote, "vote.sync", (u32 mask, int mode, int flag), { return run_vote(mask, mode, flag); })
NVVM(u32, nvvm_match32, "match.any.sync.i32", (u32 mask, u32 v), { return run_match(mask, v); })
NVVM(u32, nvvm_match64, "match.any.sync.i64", (u32 mask, u64 v), { return run_match(mask, v); })
NVVM(void, nvvm_fence_block, "membar.cta", (void), {})
NVVM(void, nvvm_fence_device, "membar.gl", (void), {})

float rt_rsqrtf(float x) { return 1 / sqrtf(x); }

// ---------------------------------------------------------------- 7  memory

static char *shared_memory;

u64 run_shared_memory(long bytes) { // below 4 GiB: a 32-bit shared address is an address here
  char *map = mmap(0, bytes + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  if (map == MAP_FAILED) return 0;
  mprotect(map + 4096, bytes, PROT_READ | PROT_WRITE);
  shared_memory = map + 4096;
  return (u64)shared_memory;
}

// n bytes that end (rounded up to 16) where a gigabyte begins that nobody may touch, and start after another one.
enum { GUARD = 1 << 30 };
void *run_guarded(size_t n, size_t *length) {
  size_t pages = (n + 4095) / 4096 * 4096;
  *length = pages + 2ul * GUARD;
  char *map = mmap(0, *length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return 0;
  mprotect(map + GUARD, pages, PROT_READ | PROT_WRITE);
  memset(map + GUARD, 0xff, pages);
  return map + GUARD + pages - (n + 15) / 16 * 16;
}
int run_guarded_free(void *array, size_t n, size_t length) { // 1: something was written beside the array
  size_t inside = (n + 15) / 16 * 16, pages = length - 2ul * GUARD;
  unsigned char *start = (unsigned char *)array - (pages - inside);
  int is_bad = 0;
  for (size_t i = 0; i < pages; i++)
    if ((i < pages - inside || i >= pages - inside + n) && start[i] != 0xff) is_bad = 1;
  munmap(start - GUARD, length);
  return is_bad;
}

typedef struct { u32 site, block, thread, pad; u64 address; } access_;
static access_ *accesses;
static long n_accesses, room;
void run_log(void *buffer, long capacity) { accesses = buffer, room = capacity, n_accesses = 0; }
long run_log_length(void) { return n_accesses; }
static long n_issued; // instructions of all warps: of a warp, as many as its busiest thread has
void run_executed(void) { me->executed++; }
long run_issued_so_far(void) { return n_issued; }
void run_access(u32 site, u64 address) {
  if (n_accesses < room) {
    int number = block[0] + grid_size[0] * (block[1] + grid_size[1] * block[2]);
    accesses[n_accesses] = (access_){site, number, me->number, 0, address};
  }
  n_accesses++;
}

// ---------------------------------------------------------------- 8  launch

static void start_block(const long *gaps, int n_gaps, long used) {
  n_live = n_threads;
  n_at_barrier = 0;
  memset(shared_memory, 0xff, used); // NaN until it is written
  for (int i = 0; i < n_gaps; i++) memset(shared_memory + gaps[2 * i], 0xa5, gaps[2 * i + 1]);
  for (int i = 0; i < n_threads; i++) {
    fibers[i].state = READY;
    fibers[i].n_copies = fibers[i].group = fibers[i].executed = 0;
  }
}

static void end_block(const long *gaps, int n_gaps) {
  for (int first = 0; first < n_threads; first += LANES) {
    long most = 0;
    for (int i = first; i < first + LANES && i < n_threads; i++)
      if (fibers[i].executed > most) most = fibers[i].executed;
    n_issued += most;
  }
  me = &fibers[0];
  for (int i = 0; i < n_gaps; i++)
    for (long at = gaps[2 * i]; at < gaps[2 * i] + gaps[2 * i + 1]; at++)
      if ((unsigned char)shared_memory[at] != 0xa5) fail("shared memory was written outside of its arrays");
  for (int i = 0; i < n_threads; i++)
    if (fibers[i].n_copies) {
      me = &fibers[i];
      fail("the block ended with a cp.async that nobody waited for");
    }
}

static void no_progress(void) {
  int example[4] = {-1, -1, -1, -1}, count[4] = {0};
  for (int i = n_threads - 1; i >= 0; i--) example[fibers[i].state] = i, count[fibers[i].state]++;
  int waiting = example[AT_BARRIER] >= 0 ? example[AT_BARRIER] : example[AT_WARP];
  me = &fibers[waiting];
  fail("deadlock: %d threads at syncthreads, %d at a warp instruction, %d have exited", count[AT_BARRIER],
       count[AT_WARP], count[EXITED]);
}

static int run_warp(int warp) { // as far as it can go
  int progress = 0, more = 1;
  while (more) {
    more = 0;
    for (int i = warp * LANES; i < warp * LANES + LANES && i < n_threads; i++)
      if (fibers[i].state == READY) switch_to(&fibers[i]), more = progress = 1;
  }
  return progress;
}

static void run_block(const int *order, int by_warps) {
  while (n_live) {
    int progress = 0;
    for (int i = 0; i < n_threads; i++) {
      fiber *f = &fibers[order[i]];
      if (f->state != READY) continue;
      progress = 1;
      if (by_warps) run_warp(f->warp);
      else switch_to(f);
    }
    if (!progress) no_progress();
  }
}

const char *run_error(void) { return error; }

static void prepare(const int *threads) {
  for (int i = 0; i < n_threads; i++) {
    fiber *f = &fibers[i];
    if (!f->stack)
      f->stack = mmap(0, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    f->number = i;
    f->tid[0] = i % threads[0], f->tid[1] = i / threads[0] % threads[1], f->tid[2] = i / threads[0] / threads[1];
    f->lane = i % LANES, f->warp = i / LANES, f->is_started = 0, f->state = EXITED;
    getcontext(&f->first);
    f->first.uc_stack.ss_sp = f->stack;
    f->first.uc_stack.ss_size = STACK_BYTES;
    f->first.uc_link = 0;
    makecontext(&f->first, fiber_main, 0);
  }
}

// order: thread numbers in the order in which they get their turns.  by_warps: a warp runs as far as it can before the
// next one starts.  blocks_backward: the last block first.  gaps: [offset, bytes] of shared memory between its arrays.
int run_launch(void (*kernel)(void *), void *args, const int *grid, const int *threads, int dynamic, const int *order,
               int by_warps, int blocks_backward, const long *gaps, int n_gaps, long shared_bytes) {
  entry = kernel, arguments = args, dynamic_bytes = dynamic, error[0] = 0;
  n_threads = threads[0] * threads[1] * threads[2];
  for (int d = 0; d < 3; d++) block_size[d] = threads[d], grid_size[d] = grid[d];
  prepare(threads);
  static char alternate[65536];
  stack_t signal_stack = {.ss_sp = alternate, .ss_size = sizeof alternate}, old_stack;
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, segv, bus;
  sigaltstack(&signal_stack, &old_stack);
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  int is_bad = sigsetjmp(failed, 1);
  if (!is_bad) {
    is_running = 1;
    long n_blocks = (long)grid[0] * grid[1] * grid[2];
    for (long i = 0; i < n_blocks; i++) {
      long number = blocks_backward ? n_blocks - 1 - i : i;
      block[0] = number % grid[0], block[1] = number / grid[0] % grid[1], block[2] = number / grid[0] / grid[1];
      start_block(gaps, n_gaps, shared_bytes);
      run_block(order, by_warps);
      end_block(gaps, n_gaps);
    }
  }
  is_running = 0;
  sigaction(SIGSEGV, &segv, 0);
  sigaction(SIGBUS, &bus, 0);
  sigaltstack(&old_stack, 0);
  return is_bad;
}
