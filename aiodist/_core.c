// The compiled part of aiodist: reductions, and calls of ranks that share memory.
//
// **Kernels.** aiodist.buffers.kernels is the reference, and does all cases that are not here. Both
// give the same bits, because both combine operands in the order of ranks. float16 and bfloat16 are
// summed in float32 and rounded once. (Of two NaNs, the one of the lower rank stays. numpy does the
// same, except for some elements at the end of an array.)
//
// **Differences.** `differ` finds the changes between two versions of a chunk of weights. Its
// reference is aiodist.channels.differences.
//
// **Tapes.** A tape is the plan of one phase, made for one area of a lane. It has the same steps as
// the plan, with known addresses. It does the work of aiodist.engine.executor and leaves the same
// bytes in memory, so other ranks cannot tell which of the two has run. If a step has to wait for
// long, the tape returns the number of steps that are done, and an `Executor` does the others.
//
// **Posts.** A call with a tag is posted in a ring: see aiodist.shared_memory.posts. Its tape has no
// steps, because all such calls do the same: post, wait for the posts of all others, reduce them.
//
// **Values.** A tape of values copies the arrays of a call to where other ranks read them, and theirs
// to the places of the result: see aiodist.prepared.lane_values. The Python code has read what ranks
// showed before. The tape only checks that all bytes but the data are the same.
//
// **Plain values** of users as metadata: see aiodist.buffers.tokens, which is the reference. What is
// not plain, and metadata that is not sound, is left to the Python code.
//
// **Messages.** An array that fits into the ring of a link is written there, and one that comes next
// is copied from there, as frames like those of `aiodist.p2p.express`, byte for byte.
//
// **Caller.** It does what `LaneExpress` and `PostExpress` do with a prepared call. It finds the call
// by the form of its arguments: see aiodist.collectives.forms. It checks whether the call may run at
// once, makes its Work, runs the tape and notes the end. If the call may not run at once, nothing has
// happened, and the Python code takes it.
//
// Build this with -ffp-contract=off, because a fused multiply-add rounds differently.

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define LAYOUT 21      // aiodist.compiled refuses a build with another number
#define BLOCK 1024     // elements in one step of the work, so that they stay in the first cache
#define ALONE 32768    // from so many bytes on, other threads may run meanwhile

// Compile the same loops for wider registers, too, and choose when loading. Needs ifunc of glibc.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#if defined(__x86_64__)
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif
#define STREAMED 4096  // copies of so many bytes into shared memory may pass by the caches

#if defined(__GNUC__)
#define SEPARATE __attribute__((noinline))
#else
#define SEPARATE
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Copy to memory that another process reads. The caches of its core mostly have those lines from the
// last time. A plain store must first get each line from there, only to overwrite it. A streaming store
// takes the line out of all caches, and writes it to memory. If two cores share a cache (or are one
// core with two threads), plain stores take half the time of streaming ones, or less. If not, they take
// up to six times as long. So one copy of `AGAIN_PLAIN` measures what plain stores take here. (MPI
// libraries choose between both by size alone.)
#define AGAIN_PLAIN 256
#define PLAIN_SPEED 8e9  // bytes a second. Plain stores that are slower wait for other caches

#define SLOW 3           // so many in a row, because the system may have taken the core meanwhile

static int streamed_left;  // so many copies stream before a plain one is measured again
static int slow_in_a_row;

static int streams(void) { return STREAMS && __atomic_load_n(&streamed_left, __ATOMIC_RELAXED) > 0; }

#if STREAMS
static inline void copy_lines(char *into, const char *from, size_t nbytes, const int is_streaming) {
    size_t before = -(uintptr_t)into & 63, at;
    if (before > nbytes) before = nbytes;
    memcpy(into, from, before);
    for (at = before; at + 64 <= nbytes; at += 64) {
        const __m128i *next = (const __m128i *)(from + at);
        __m128i *const line = (__m128i *)(into + at);
        const __m128i a = _mm_loadu_si128(next), b = _mm_loadu_si128(next + 1);
        const __m128i c = _mm_loadu_si128(next + 2), d = _mm_loadu_si128(next + 3);
        if (is_streaming) {
            _mm_stream_si128(line, a);
            _mm_stream_si128(line + 1, b);
            _mm_stream_si128(line + 2, c);
            _mm_stream_si128(line + 3, d);
        } else {
            _mm_store_si128(line, a);
            _mm_store_si128(line + 1, b);
            _mm_store_si128(line + 2, c);
            _mm_store_si128(line + 3, d);
        }
    }
    memcpy(into + at, from + at, nbytes - at);
}
#endif

// Copy with streaming stores, where the processor has them.
static void stream(char *into, const char *from, size_t nbytes) {
#if STREAMS
    copy_lines(into, from, nbytes, 1);
    _mm_sfence();  // the word that shows this data is a plain store, which does not wait for it
#else
    memcpy(into, from, nbytes);
#endif
}

// For long copies `memcpy` uses one instruction, `rep movsb`. That takes ten times as long if the target
// lies a few bytes behind the source, modulo the page size.
static void copy_plainly(char *into, const char *from, size_t nbytes) {
#if STREAMS
    const size_t behind = ((uintptr_t)into - (uintptr_t)from) & 4095;
    if (nbytes >= STREAMED && behind && behind < 64) {
        copy_lines(into, from, nbytes, 0);
        return;
    }
#endif
    memcpy(into, from, nbytes);
}

static void copy_to_shared(char *into, const char *from, size_t nbytes) {
#if STREAMS
    if (nbytes >= STREAMED && streams()) {
        __atomic_fetch_sub(&streamed_left, 1, __ATOMIC_RELAXED);
        stream(into, from, nbytes);
        return;
    }
    if (nbytes >= STREAMED) {
        const double start = now();
        copy_plainly(into, from, nbytes);
        const int is_slow = (now() - start) * PLAIN_SPEED > (double)nbytes;
        const int slow = is_slow ? __atomic_load_n(&slow_in_a_row, __ATOMIC_RELAXED) + 1 : 0;
        if (slow >= SLOW) __atomic_store_n(&streamed_left, AGAIN_PLAIN, __ATOMIC_RELAXED);
        __atomic_store_n(&slow_in_a_row, slow < SLOW ? slow : SLOW - 1, __ATOMIC_RELAXED);
        return;
    }
#endif
    memcpy(into, from, nbytes);
}

// ---- elements: their form in memory, and their form in sums -------------------------------------

#define SAME(x) (x)

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

// Round to nearest, ties to even. A NaN is kept apart, because rounding could turn it into infinity.
static inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

static inline float from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7FFF;
    const uint32_t small = bits_of((float)(int32_t)rest * 0x1p-24f);  // below 2^-14, exactly
    const uint32_t large = (rest << 13) + (rest < 0x7C00 ? 112u << 23 : 224u << 23);
    return float_of(sign | (rest < 0x400 ? small : large));
}

// Round to nearest, ties to even. Small numbers are rounded by an addition, after which the last bit
// is 2^-24, as in the smallest float16. (After F. Giesen, "float_to_half_fast3".)
static inline uint16_t to_float16(float x) {
    const uint32_t sign = bits_of(x) & 0x80000000, rest = bits_of(x) ^ sign;
    const uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
    const uint32_t payload = (rest & 0x7FFFFF) >> 13;
    const uint32_t nan = 0x7C00 + (payload ? payload : 1);
    const uint32_t special = rest > 0x7F800000 ? nan : 0x7C00;
    const uint32_t finite = rest < (113u << 23) ? small : normal;
    return (uint16_t)((rest >= (143u << 23) ? special : finite) | (sign >> 16));
}

// ---- kernels ------------------------------------------------------------------------------------

typedef void (*kernel)(void *out, void *const *operands, int count, Py_ssize_t length, double size);

// T: type in memory. A: type of the accumulator. END: the last step, in which `n` is the number of
// ranks as an A. `out` may be one of the operands, because a block is read before it is written.
// Each operand has a loop of its own, because compilers that join two use no wide registers.
// A `cell` is a T at any address, because arrays of users need not be aligned.
#define CELL(NAME, T) typedef T NAME##_cell __attribute__((aligned(1)));
#define KERNEL(NAME, T, A, LOAD, EXPR, END, STORE)                                                 \
    CELL(NAME, T)                                                                                  \
    CLONES SEPARATE static void NAME##_next(A *restrict total, const NAME##_cell *restrict next,   \
                                            Py_ssize_t stop) {                                     \
        for (Py_ssize_t i = 0; i < stop; i++) {                                                    \
            const A x = total[i], y = LOAD(next[i]);                                               \
            total[i] = (A)(EXPR);                                                                  \
        }                                                                                          \
    }                                                                                              \
    CLONES static void NAME(void *out, void *const *operands, int count, Py_ssize_t length,        \
                            double size) {                                                         \
        const A n = (A)size;                                                                       \
        (void)n;                                                                                   \
        for (Py_ssize_t start = 0; start < length; start += BLOCK) {                               \
            const Py_ssize_t stop = length - start < BLOCK ? length - start : BLOCK;               \
            A total[BLOCK];                                                                        \
            const NAME##_cell *first = (const NAME##_cell *)operands[0] + start;                   \
            NAME##_cell *into = (NAME##_cell *)out + start;                                        \
            for (Py_ssize_t i = 0; i < stop; i++) total[i] = LOAD(first[i]);                       \
            for (int k = 1; k < count; k++)                                                        \
                NAME##_next(total, (const NAME##_cell *)operands[k] + start, stop);                \
            for (Py_ssize_t i = 0; i < stop; i++) {                                                \
                const A x = total[i];                                                              \
                into[i] = STORE(END);                                                              \
            }                                                                                      \
        }                                                                                          \
    }

// This says which of two NaNs stays, because compilers swap the operands of + and *.
#define SUM (x + (x != x ? x : y))
#define PRODUCT (x * (x != x ? x : y))
#define MINIMUM ((x < y || x != x) ? x : y)
#define MAXIMUM ((x > y || x != x) ? x : y)

#define FLOATS(S, T, A, LOAD, STORE)                                                               \
    KERNEL(sum_##S, T, A, LOAD, SUM, x, STORE)                                                   \
    KERNEL(avg_##S, T, A, LOAD, SUM, x / n, STORE)                                               \
    KERNEL(product_##S, T, A, LOAD, PRODUCT, x, STORE)                                                \
    KERNEL(min_##S, T, A, LOAD, MINIMUM, x, STORE)                                                 \
    KERNEL(max_##S, T, A, LOAD, MAXIMUM, x, STORE)

FLOATS(bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
FLOATS(float16, uint16_t, float, from_float16, to_float16)
KERNEL(avg_float32, float, float, SAME, SUM, x / n, SAME)
KERNEL(avg_float64, double, double, SAME, SUM, x / n, SAME)

// `into` may be an operand, but never overlaps one in part. So wide registers give right results.
#if defined(__GNUC__) && !defined(__clang__)
#define NO_OVERLAP _Pragma("GCC ivdep")
#else
#define NO_OVERLAP
#endif

// Sums and products that numpy can do by itself, for tapes, which do not use numpy. Four operands at a
// time take less time than one after the other, because a core then waits for memory less often. More
// are added block by block.
#define PLAIN(NAME, T, EXPR)                                                                       \
    CELL(NAME, T)                                                                                  \
    static inline T NAME##_of(T x, T y) { return (T)(EXPR); }                                      \
    CLONES SEPARATE static void NAME##_two(NAME##_cell *into, const NAME##_cell *a,                \
                                           const NAME##_cell *b, Py_ssize_t stop) {                \
        NO_OVERLAP                                                                                 \
        for (Py_ssize_t i = 0; i < stop; i++) into[i] = NAME##_of(a[i], b[i]);                     \
    }                                                                                              \
    CLONES SEPARATE static void NAME##_four(NAME##_cell *into, const NAME##_cell *a,               \
                                            const NAME##_cell *b, const NAME##_cell *c,            \
                                            const NAME##_cell *d, Py_ssize_t stop) {               \
        NO_OVERLAP                                                                                 \
        for (Py_ssize_t i = 0; i < stop; i++)                                                      \
            into[i] = NAME##_of(NAME##_of(NAME##_of(a[i], b[i]), c[i]), d[i]);                     \
    }                                                                                              \
    static void NAME(void *out, void *const *operands, int count, Py_ssize_t length,               \
                     double size) {                                                                \
        NAME##_cell *const *of = (NAME##_cell *const *)operands;                                   \
        const Py_ssize_t most = count == 2 || count == 4 ? length : BLOCK;                         \
        (void)size;                                                                                \
        for (Py_ssize_t start = 0; start < length; start += most) {                                \
            const Py_ssize_t stop = length - start < most ? length - start : most;                 \
            NAME##_cell total[BLOCK], *const into = (NAME##_cell *)out + start;                    \
            const NAME##_cell *x = of[0] + start;                                                  \
            if (count == 1) memmove(into, x, stop * sizeof(T));                                    \
            for (int k = 1, more; k < count; x = total, k += more) {                               \
                more = count - k < 3 ? 1 : 3;                                                      \
                NAME##_cell *const sum = k + more < count ? total : into;                          \
                if (more == 1)                                                                     \
                    NAME##_two(sum, x, of[k] + start, stop);                                       \
                else                                                                               \
                    NAME##_four(sum, x, of[k] + start, of[k + 1] + start, of[k + 2] + start, stop);\
            }                                                                                      \
        }                                                                                          \
    }

// Integers wrap around. They are added as unsigned, because signed overflow is undefined in C.
#define INTEGERS(S, T, U)                                                                          \
    PLAIN(sum_##S, U, x + y)                                                                       \
    PLAIN(product_##S, U, (uint64_t)x * (uint64_t)y)                                               \
    PLAIN(min_##S, T, x < y ? x : y)                                                               \
    PLAIN(max_##S, T, x > y ? x : y)

#define FLOATS_OF(S, T)                                                                            \
    PLAIN(sum_##S, T, SUM)                                                                         \
    PLAIN(product_##S, T, PRODUCT)                                                                 \
    PLAIN(min_##S, T, MINIMUM)                                                                     \
    PLAIN(max_##S, T, MAXIMUM)

FLOATS_OF(float32, float)
FLOATS_OF(float64, double)
INTEGERS(int8, int8_t, uint8_t)
INTEGERS(int16, int16_t, uint16_t)
INTEGERS(int32, int32_t, uint32_t)
INTEGERS(int64, int64_t, uint64_t)
INTEGERS(uint8, uint8_t, uint8_t)
INTEGERS(uint16, uint16_t, uint16_t)
INTEGERS(uint32, uint32_t, uint32_t)
INTEGERS(uint64, uint64_t, uint64_t)

typedef struct {
    const char *op, *dtype;
    int itemsize;
    kernel run;
} Entry;

#define ENTRIES(S)                                                                                 \
    {"SUM", #S, 2, sum_##S}, {"AVG", #S, 2, avg_##S}, {"PRODUCT", #S, 2, product_##S},             \
        {"MIN", #S, 2, min_##S}, {"MAX", #S, 2, max_##S}

#define WHOLE(S, N)                                                                                \
    {"SUM", #S, N, sum_##S}, {"PRODUCT", #S, N, product_##S}, {"MIN", #S, N, min_##S},             \
        {"MAX", #S, N, max_##S}

static const Entry entries[] = {
    ENTRIES(bfloat16),
    ENTRIES(float16),
    {"AVG", "float32", 4, avg_float32},
    {"AVG", "float64", 8, avg_float64},
    WHOLE(float32, 4), WHOLE(float64, 8),
    WHOLE(int8, 1), WHOLE(int16, 2), WHOLE(int32, 4), WHOLE(int64, 8),
    WHOLE(uint8, 1), WHOLE(uint16, 2), WHOLE(uint32, 4), WHOLE(uint64, 8),
};
#define COUNT ((Py_ssize_t)(sizeof entries / sizeof *entries))

// ---- differences --------------------------------------------------------------------------------

#define FAR 255  // a gap of so many elements with no change behind it, so the gap goes on

typedef struct {
    Py_ssize_t count, steps;  // changes, and bytes of `gaps`. count < 0: there is no room
} Changes;

// Most blocks of this size have not changed, so a whole block is compared first.
#define WORDS 8

// T: type of an element. `room`: the most changes that fit. Each change takes a byte of `gaps`, and
// so do each FAR elements without one. Elements are in words in the order of little-endian processors.
#define DIFFER(NAME, T)                                                                            \
    CLONES static Changes NAME(const char *old, const char *now, Py_ssize_t nbytes,                \
                               unsigned char *gaps, void *into, Py_ssize_t room) {                 \
        const int bits = 8 * sizeof(T);                                                            \
        T *values = into;                                                                          \
        Py_ssize_t count = 0, steps = 0, next = 0; /* next: behind the last change */              \
        for (Py_ssize_t start = 0; start < nbytes; start += 8 * WORDS) {                           \
            const Py_ssize_t left = nbytes - start;                                                \
            uint64_t a[WORDS] = {0}, b[WORDS] = {0};                                               \
            if (left >= 8 * WORDS) {                                                               \
                memcpy(a, old + start, 8 * WORDS);                                                 \
                memcpy(b, now + start, 8 * WORDS);                                                 \
            } else {                                                                               \
                memcpy(a, old + start, (size_t)left);                                              \
                memcpy(b, now + start, (size_t)left);                                              \
            }                                                                                      \
            uint64_t differs = 0;                                                                  \
            for (int k = 0; k < WORDS; k++) differs |= a[k] ^ b[k];                                \
            if (!differs) continue;                                                                \
            unsigned words = 0; /* a bit for each change, because branches would be mispredicted */ \
            for (int k = 0; k < WORDS; k++) words |= (unsigned)(a[k] != b[k]) << k;                \
            for (; words; words &= words - 1) {                                                    \
                const int k = __builtin_ctz(words);                                                \
                for (uint64_t rest = a[k] ^ b[k]; rest;) {                                         \
                    const int j = __builtin_ctzll(rest) / bits;                                    \
                    rest &= ~((uint64_t)(T)-1 << (j * bits));                                      \
                    if (count == room) return (Changes){-1, 0};                                    \
                    const Py_ssize_t at = (start + 8 * k) / (Py_ssize_t)sizeof(T) + j;             \
                    for (; at - next >= FAR; next += FAR) gaps[steps++] = FAR;                     \
                    gaps[steps++] = (unsigned char)(at - next);                                    \
                    next = at + 1;                                                                 \
                    const T step = (T)((b[k] >> (j * bits)) - (a[k] >> (j * bits)));               \
                    values[count++] = (T)((T)(step << 1) ^ (T)-(step >> (bits - 1)));              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        return (Changes){count, steps};                                                            \
    }

DIFFER(differ_1, uint8_t)
DIFFER(differ_2, uint16_t)
DIFFER(differ_4, uint32_t)
DIFFER(differ_8, uint64_t)

// ---- plain values -------------------------------------------------------------------------------

#define FEW_TOKENS 64  // as in aiodist.buffers.tokens
#define DEEPEST 100    // the most containers within containers, as in aiodist.buffers.tokens
#define COUNT_ROOM 5   // bytes of the largest number of tokens
enum { LIST_OF, TUPLE_OF, DICT_OF, CONTAINERS };

// `most`: a value of more bytes is too large. `is_tight`: it has more tokens than a few, so ints take as
// few bytes as they can. `other`: what is written in place of a leaf of another type (see
// `encoding._Encoder.leaf`); NULL: nothing is.
typedef struct {
    unsigned char *data;
    Py_ssize_t length, room, most;
    long long tokens;
    int is_tight;
    PyObject *other;
} Written;

// A place for so many more bytes, or NULL with an error.
static unsigned char *more_bytes(Written *to, Py_ssize_t nbytes) {
    if (to->room - to->length < nbytes) {
        const Py_ssize_t room = 2 * to->room + nbytes + 64;
        unsigned char *data = PyMem_Realloc(to->data, (size_t)room);
        if (!data) return PyErr_NoMemory(), NULL;
        to->data = data;
        to->room = room;
    }
    to->length += nbytes;
    return to->data + to->length - nbytes;
}

static void put_big_endian(unsigned char *at, uint64_t word, int nbytes) {
    for (int k = nbytes; k-- > 0; word >>= 8) at[k] = (unsigned char)word;
}

static uint64_t big_endian(const unsigned char *at, int nbytes) {
    uint64_t word = 0;
    for (int k = 0; k < nbytes; k++) word = word << 8 | at[k];
    return word;
}

// A code, and a number in so many bytes. 1: it is written. -1: an error.
static int put_word(Written *to, int code, uint64_t word, int nbytes) {
    unsigned char *at = more_bytes(to, 1 + nbytes);
    if (!at) return -1;
    *at = (unsigned char)code;
    put_big_endian(at + 1, word, nbytes);
    return 1;
}

static int put_text(Written *to, const char *text, Py_ssize_t length, int is_bytes) {
    const int code = is_bytes ? 0xc4 : 0xd9, size = length < 1 << 8 ? 0 : length < 1 << 16 ? 1 : 2;
    if (length > UINT32_MAX || length > to->most) return 0;
    const int is_short = !is_bytes && length < 32;
    const int failed = is_short ? put_word(to, 0xa0 | (int)length, 0, 0)
                                : put_word(to, code + size, (uint64_t)length, 1 << size);
    unsigned char *at = failed < 0 ? NULL : more_bytes(to, length);
    if (!at) return -1;
    memcpy(at, text, (size_t)length);
    return 1;
}

// An int in as few bytes as it can take.
static int put_tight(Written *to, long long number) {
    const uint64_t word = (uint64_t)number;
    if (number >= -32 && number < 128) return put_word(to, (unsigned char)number, 0, 0);
    if (number > 0) {
        const int size = word < 1 << 8 ? 0 : word < 1 << 16 ? 1 : word <= UINT32_MAX ? 2 : 3;
        return put_word(to, 0xcc + size, word, 1 << size);
    }
    const int size = number >= INT8_MIN ? 0 : number >= INT16_MIN ? 1 : number >= INT32_MIN ? 2 : 3;
    return put_word(to, 0xd0 + size, word, 1 << size);
}

static int put_value(Written *to, PyObject *value, int depth, int is_key);

// A leaf of another type, by what Python makes of it: a bytearray with its token, or another object.
static int put_other(Written *to, PyObject *value, int depth, int is_key) {
    PyObject *const other = to->other;
    if (!other || is_key) return 0;
    PyObject *made = PyObject_CallOneArg(other, value);
    if (!made) return -1;
    int done = 1;
    if (PyByteArray_CheckExact(made)) {
        const Py_ssize_t length = PyByteArray_GET_SIZE(made);
        unsigned char *at = more_bytes(to, length);
        if (at)
            memcpy(at, PyByteArray_AS_STRING(made), (size_t)length);
        else
            done = -1;
    } else {
        to->tokens--;
        to->other = NULL;  // so that it cannot go on for ever: what it holds is asked for again
        if (Py_TYPE(made) == &PyDict_Type || Py_TYPE(made) == &PyList_Type || Py_TYPE(made) == &PyTuple_Type)
            to->other = other;
        done = put_value(to, made, depth, is_key);
        to->other = other;
    }
    Py_DECREF(made);
    return done;
}

static int put_items(Written *to, PyObject *value, int kind, Py_ssize_t count, int depth, int is_key) {
    int done = 1;
    Py_ssize_t k = 0;
    if (kind == DICT_OF) {
        PyObject *key, *item;
        Py_ssize_t position = 0;
        for (; done > 0 && PyDict_Next(value, &position, &key, &item); k++) {
            // `other` may run any code, even code that changes the dict.
            Py_INCREF(key);
            Py_INCREF(item);
            if ((done = put_value(to, key, depth, 1)) > 0) done = put_value(to, item, depth, 0);
            Py_DECREF(key);
            Py_DECREF(item);
        }
    }
    for (; kind != DICT_OF && done > 0 && k < count && k < PySequence_Fast_GET_SIZE(value); k++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, k));
        done = put_value(to, item, depth, is_key);
        Py_DECREF(item);
    }
    return done > 0 && k != count ? 0 : done;
}

// 1: the value is written. 0: it is not plain, or too large. -1: an error. Keys hold no list or dict.
static int put_value(Written *to, PyObject *value, int depth, int is_key) {
    PyTypeObject *const type = Py_TYPE(value);
    if (++to->tokens > (to->is_tight ? UINT32_MAX : FEW_TOKENS)) return 0;
    if (to->is_tight && to->length > to->most) return 0;
    if (value == Py_None) return put_word(to, 0xc0, 0, 0);
    if (type == &PyBool_Type) return put_word(to, value == Py_True ? 0xc3 : 0xc2, 0, 0);
    if (type == &PyLong_Type) {
        int overflow;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) return put_other(to, value, depth, is_key);
        return to->is_tight ? put_tight(to, number) : put_word(to, 0xd3, (uint64_t)number, 8);
    }
    if (type == &PyFloat_Type) {
        const double number = PyFloat_AS_DOUBLE(value);
        uint64_t word;
        memcpy(&word, &number, sizeof word);
        return put_word(to, 0xcb, word, 8);
    }
    if (type == &PyUnicode_Type) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(value, &length);
        if (text) return put_text(to, text, length, 0);
        PyErr_Clear();  // a lone surrogate
        return put_other(to, value, depth, is_key);
    }
    if (type == &PyBytes_Type) return put_text(to, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 1);
    const int kind = type == &PyTuple_Type ? TUPLE_OF : type == &PyList_Type ? LIST_OF : DICT_OF;
    if (kind == DICT_OF && type != &PyDict_Type) return put_other(to, value, depth, is_key);
    if (is_key && kind != TUPLE_OF) return 0;
    const Py_ssize_t count = PyObject_Size(value);
    if (count < 0 || count > UINT32_MAX || depth >= DEEPEST) return count < 0 ? -1 : 0;
    unsigned char *at = more_bytes(to, 6);
    if (!at) return -1;
    at[0] = 0xd6;
    at[1] = (unsigned char)kind;
    for (int k = 0; k < 4; k++) at[2 + k] = (unsigned char)(count >> 8 * k);
    return put_items(to, value, kind, count, depth + 1, is_key);
}

// Count the tokens of a value, until there are more than a few. 0: they cannot be counted, because
// there are containers of other types.
static int count_tokens(PyObject *value, int count, int depth) {
    PyTypeObject *const type = Py_TYPE(value);
    const int is_dict = type == &PyDict_Type;
    if (++count > FEW_TOKENS || depth > DEEPEST) return count;
    if (!is_dict && type != &PyList_Type && type != &PyTuple_Type) {
        if (!PyDict_Check(value) && !PyList_Check(value) && !PyTuple_Check(value)) return count;
        // A list of another type may have more items than it shows here, but these are enough or not.
        const Py_ssize_t items = PyDict_Check(value) ? 2 * PyDict_GET_SIZE(value) : Py_SIZE(value);
        return items > FEW_TOKENS ? FEW_TOKENS + 1 : 0;
    }
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (is_dict && count && count <= FEW_TOKENS && PyDict_Next(value, &position, &key, &item)) {
        count = count_tokens(key, count, depth + 1);
        if (count) count = count_tokens(item, count, depth + 1);
    }
    for (Py_ssize_t k = 0; !is_dict && count && count <= FEW_TOKENS && k < PySequence_Fast_GET_SIZE(value); k++)
        count = count_tokens(PySequence_Fast_GET_ITEM(value, k), count, depth + 1);
    return count;
}

// Write the value behind room for the number of its tokens, which is written last.
static PyObject *write_value(PyObject *self, PyObject *args) {
    Py_ssize_t most = PY_SSIZE_T_MAX - COUNT_ROOM;
    PyObject *value, *other = NULL, *made = NULL;
    if (!PyArg_ParseTuple(args, "O|nO:write_value", &value, &most, &other)) return NULL;
    if (most > PY_SSIZE_T_MAX - COUNT_ROOM) most = PY_SSIZE_T_MAX - COUNT_ROOM;
    const int counted = count_tokens(value, 0, 0);
    Written to = {.most = most + COUNT_ROOM, .other = other, .is_tight = counted > FEW_TOKENS};
    int done = !counted ? 0 : more_bytes(&to, COUNT_ROOM) ? put_value(&to, value, 0, 0) : -1;
    if (done > 0) {
        Written count = {.most = COUNT_ROOM};
        const Py_ssize_t before = put_tight(&count, to.tokens) < 0 ? -1 : COUNT_ROOM - count.length;
        if (before < 0)
            done = -1;
        else if (to.length - before > most || to.is_tight != (to.tokens > FEW_TOKENS))
            done = 0;
        else
            memcpy(to.data + before, count.data, (size_t)count.length);
        PyMem_Free(count.data);
        if (done > 0) made = PyBytes_FromStringAndSize((char *)to.data + before, to.length - before);
    }
    if (!done) made = Py_NewRef(Py_None);
    PyMem_Free(to.data);
    return made;
}

// `owed`: values that open containers claim, and that are still to come.
// `other`: what reads extensions of other types (see `values._Reader.extension`); NULL: nothing does.
typedef struct {
    const unsigned char *at, *end;
    long long tokens, owed;
    PyObject *other;
} Reading;

static PyObject *get_value(Reading *from, int depth, int is_key);

// A list, tuple or dict, whose items follow. NULL: see `get_value`.
static PyObject *get_container(Reading *from, int kind, int depth, int is_key) {
    const uint64_t count = from->at[0] | from->at[1] << 8 | from->at[2] << 16 | (uint64_t)from->at[3] << 24;
    from->at += 4;
    from->owed += kind == DICT_OF ? 2 * (long long)count : (long long)count;
    // Each value takes a byte or more. So all containers together are no larger than the metadata,
    // whatever numbers they claim.
    if (depth >= DEEPEST || (is_key && kind != TUPLE_OF) || from->owed > from->end - from->at) return NULL;
    PyObject *made = kind == LIST_OF    ? PyList_New((Py_ssize_t)count)
                     : kind == TUPLE_OF ? PyTuple_New((Py_ssize_t)count)
                                        : PyDict_New();
    for (uint64_t k = 0; made && k < count; k++) {
        PyObject *key = kind == DICT_OF ? get_value(from, depth + 1, 1) : NULL;
        PyObject *item = kind == DICT_OF && !key ? NULL : get_value(from, depth + 1, is_key);
        if (!item || (key && PyDict_SetItem(made, key, item) < 0)) {
            Py_CLEAR(made);
        } else if (kind == LIST_OF) {
            PyList_SET_ITEM(made, (Py_ssize_t)k, item);
            item = NULL;
        } else if (kind == TUPLE_OF) {
            PyTuple_SET_ITEM(made, (Py_ssize_t)k, item);
            item = NULL;
        }
        Py_XDECREF(key);
        Py_XDECREF(item);
    }
    if (made && kind == DICT_OF && (uint64_t)PyDict_GET_SIZE(made) != count) Py_CLEAR(made);  // equal keys
    return made;
}

// The value that begins here. NULL: the Python code has to read it, or to say what is wrong.
static PyObject *get_value(Reading *from, int depth, int is_key) {
    if (from->at >= from->end) return NULL;
    const unsigned char code = *from->at++;
    from->tokens++;
    from->owed--;
    if (code < 0x80 || code >= 0xe0) return PyLong_FromLong((signed char)code);
    if (code == 0xc0) return Py_NewRef(Py_None);
    if (code == 0xc2 || code == 0xc3) return PyBool_FromLong(code & 1);
    int width = 0;       // bytes of a number, or of a length
    Py_ssize_t data = 0;  // bytes of a text, or of an extension
    const int is_extension = (code >= 0xc7 && code <= 0xc9) || (code >= 0xd4 && code <= 0xd8);
    const int is_text = code < 0xc0 || (code >= 0xd9 && code <= 0xdb), is_bytes = code >= 0xc4 && code <= 0xc6;
    if (code < 0xc0) {
        if (code < 0xa0) return NULL;
        data = code & 31;
    } else if (is_text || is_bytes) {
        width = 1 << (code - (is_text ? 0xd9 : 0xc4));
    } else if (code >= 0xcc && code <= 0xd3) {
        width = 1 << (code & 3);
    } else if (code == 0xcb) {
        width = 8;
    } else if (is_extension) {
        width = code < 0xd4 ? 1 << (code - 0xc7) : 0;
        data = code < 0xd4 ? 0 : 1 << (code - 0xd4);
    } else {
        return NULL;
    }
    if (from->end - from->at < width + data) return NULL;
    const uint64_t word = big_endian(from->at, width);
    from->at += width;
    if (is_extension) {
        if (width) data = (Py_ssize_t)word;
        if (from->end - from->at < 1 + data) return NULL;
        const int kind = (signed char)*from->at++;
        if (kind >= 0 && kind < CONTAINERS)
            return data == 4 ? get_container(from, kind, depth, is_key) : NULL;
        from->at += data;
        if (!from->other || is_key) return NULL;
        return PyObject_CallFunction(from->other, "iy#", kind, (const char *)from->at - data, data);
    }
    if (is_text || is_bytes) {
        if (width) data = (Py_ssize_t)word;
        if (from->end - from->at < data) return NULL;
        const char *text = (const char *)from->at;
        from->at += data;
        return is_bytes ? PyBytes_FromStringAndSize(text, data) : PyUnicode_DecodeUTF8(text, data, NULL);
    }
    if (code == 0xcb) {
        double number;
        memcpy(&number, &word, sizeof number);
        return PyFloat_FromDouble(number);
    }
    if (code < 0xd0) return PyLong_FromUnsignedLongLong(word);
    const int unused = 64 - 8 * width;  // bits
    return PyLong_FromLongLong((long long)(word << unused) >> unused);
}

// Forget an error, because the Python code finds it again, or knows better. A KeyboardInterrupt stays,
// because it comes only once.
static void forget_error(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

static PyObject *read_value(PyObject *self, PyObject *args) {
    Py_buffer view;
    Reading from = {.owed = 1};
    if (!PyArg_ParseTuple(args, "y*|O:read_value", &view, &from.other)) return NULL;
    from.at = view.buf;
    from.end = from.at + view.len;
    PyObject *count = get_value(&from, DEEPEST, 0), *made = NULL;
    from.tokens = 0;
    from.owed = 1;
    if (count && PyLong_CheckExact(count)) made = get_value(&from, 0, 0);
    if (made && (from.at != from.end || PyLong_AsLongLong(count) != from.tokens)) Py_CLEAR(made);
    Py_XDECREF(count);
    PyBuffer_Release(&view);
    if (made) return made;
    forget_error();
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
}

// ---- functions for Python -----------------------------------------------------------------------

static PyObject *find(PyObject *self, PyObject *args) {
    const char *op, *dtype;
    if (!PyArg_ParseTuple(args, "ss:find", &op, &dtype)) return NULL;
    for (Py_ssize_t i = 0; i < COUNT; i++)
        if (!strcmp(entries[i].op, op) && !strcmp(entries[i].dtype, dtype)) return PyLong_FromSsize_t(i);
    Py_RETURN_NONE;
}

#define FEW 16  // up to so many operands need no memory of the heap

static PyObject *reduce(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "reduce takes a kernel, operands, out and size");
        return NULL;
    }
    const Py_ssize_t which = PyLong_AsSsize_t(args[0]);
    const double size = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (which < 0 || which >= COUNT) {
        PyErr_Format(PyExc_ValueError, "there is no kernel %zd", which);
        return NULL;
    }
    const Entry *entry = &entries[which];
    PyObject *sequence = PySequence_Fast(args[1], "operands is a sequence of arrays");
    if (!sequence) return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    if (count < 1 || count > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "there are no operands");
        Py_DECREF(sequence);
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t held = 0;  // buffers to release: first `out`, then the operands
    Py_buffer few[FEW + 1], *buffers = few;
    void *few_places[FEW], **places = few_places;
    if (count > FEW) {
        buffers = PyMem_New(Py_buffer, count + 1);
        places = PyMem_New(void *, count);
        if (!buffers || !places) {
            PyErr_NoMemory();
            goto end;
        }
    }
    if (PyObject_GetBuffer(args[2], &buffers[0], PyBUF_WRITABLE | PyBUF_ND) < 0) goto end;
    held = 1;
    const Py_ssize_t nbytes = buffers[0].len;
    if (buffers[0].itemsize != entry->itemsize) {
        PyErr_Format(PyExc_ValueError, "out has elements of %zd bytes, %s has %d",
                     buffers[0].itemsize, entry->dtype, entry->itemsize);
        goto end;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_buffer *buffer = &buffers[k + 1];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, k), buffer, PyBUF_ND) < 0) goto end;
        held++;
        if (buffer->itemsize != entry->itemsize || buffer->len != nbytes) {
            PyErr_Format(PyExc_ValueError, "operand %zd has %zd bytes, out has %zd", k, buffer->len,
                         nbytes);
            goto end;
        }
        places[k] = buffer->buf;
    }
    if (nbytes * count < ALONE) {
        entry->run(buffers[0].buf, places, (int)count, nbytes / entry->itemsize, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        entry->run(buffers[0].buf, places, (int)count, nbytes / entry->itemsize, size);
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
end:
    while (held) PyBuffer_Release(&buffers[--held]);
    if (buffers != few) PyMem_Free(buffers);
    if (places != few_places) PyMem_Free(places);
    Py_DECREF(sequence);
    return result;
}

static PyObject *differ(PyObject *self, PyObject *args) {
    Py_buffer old, now, gaps, values;
    if (!PyArg_ParseTuple(args, "y*y*w*w*:differ", &old, &now, &gaps, &values)) return NULL;
    PyObject *result = NULL;
    const Py_ssize_t width = values.itemsize;
    if (width != 1 && width != 2 && width != 4 && width != 8)
        PyErr_Format(PyExc_ValueError, "there are no elements of %zd bytes", width);
    else if (old.len != now.len || old.len % width)
        PyErr_Format(PyExc_ValueError, "%zd and %zd bytes of elements of %zd", old.len, now.len, width);
    else if (gaps.len < values.len / width + old.len / width / FAR)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not enough for gaps", gaps.len);
    else {
        const Py_ssize_t room = values.len / width;
        Changes found;
        Py_BEGIN_ALLOW_THREADS
        found = (width == 1   ? differ_1
                 : width == 2 ? differ_2
                 : width == 4 ? differ_4
                              : differ_8)(old.buf, now.buf, old.len, gaps.buf, values.buf, room);
        Py_END_ALLOW_THREADS
        if (found.count < 0)
            result = Py_NewRef(Py_None);
        else
            result = Py_BuildValue("nn", found.count, found.steps);
    }
    PyBuffer_Release(&old);
    PyBuffer_Release(&now);
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&values);
    return result;
}

// ---- shared state -------------------------------------------------------------------------------

enum { IS_DUE, WATCH, FOLLOWS, ROUSE, SEEN, ADD, FINISH, SET_RESULT, TAPES, TELL, FIND, WAKE,
       DTYPE, IS_NEG, STORAGE, DATA_PTR, NBYTES_OF, CLASS, RUNNING, ALL_REDUCE, PART, SEND, RECV,
       TRACE_HOOK, IN_VAIN, STAY_AWAKE, WAKE_PEER, BELL, TIMER, LEAVE_TO_CALL,
       SHOWS_ANY, AREA, START, NAMES };
static const char *const names[] = {"is_due", "watch", "follows", "rouse", "seen", "add", "finish",
                                    "set_result", "tapes", "tell", "_find", "wake", "dtype",
                                    "is_neg", "untyped_storage", "data_ptr", "nbytes", "__class__",
                                    "__asyncio_running_event_loop__", "all_reduce", "part", "send",
                                    "recv", "trace", "in_vain", "_stay_awake",
                                    "_wake_peer", "_bell", "_timer", "leave_to_call",
                                    "shows_any", "area", "start"};

typedef struct {
    PyTypeObject *row;      // the base of lanes
    PyTypeObject *tape, *ring, *cursor, *naps, *pace, *counts, *rings, *debt, *pushes;
    PyObject *ndarray;      // numpy's type of arrays
    PyObject *names[NAMES];  // names of attributes
    PyObject *get_running_loop, *running, *loop;  // see `running_loop`
} State;

static struct PyModuleDef module;

static State *state_of(PyTypeObject *type) {
    PyObject *found = PyType_GetModuleByDef(type, &module);
    return found ? PyModule_GetState(found) : NULL;
}

// The beginning of a numpy array, which is the same in all versions of numpy.
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} Array;
enum { CONTIGUOUS = 0x1, ALIGNED = 0x100, PLAIN_ARRAY = 0x501 };  // this one is writable, too

// Tensors of torch are read by the C exchange of DLPack, version 1: see dlpack.h.
typedef struct {
    void *data;
    int32_t device, device_id, nd;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *dimensions, *strides;
    uint64_t offset;
} Tensor;
typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *managed, *to_python;
    int (*read)(void *object, Tensor *into);  // the result is valid as long as the object lives
} Exchange;
enum { ON_CPU = 1, COMPLEX = 5 };

// ---- the words of a board: see aiodist.shared_memory.board --------------------------------------

// The words of posts are behind them, as in aiodist.shared_memory.posts.
enum { HEAD = 384, LAP = 385, GIVEN_UP = 386, NAP = 392, DOZES = 393, LENGTH_AT = 8, NUMBER_AT = 16,
       UNIT = 32 };
enum { STAMP = 0, CALL = 1, ABORTED = 3, PLACE = 5, CORE = 7, ASLEEP = 8, WANTED = 9, HOW = 10,
       THREAD = 11 };
enum { TEXT = 128 };
#define AN_OPERATION (1ll << 24)
#define A_PHASE (1ll << 20)
#define TEXT_ROOM 1016

// Memory order. Each word has one writer, so plain loads and stores are enough. Two orders must be
// kept. The comment above `fence` in aiodist.shared_memory.board gives the reasons.
//
// 1. Data before the word that shows it. So a word is stored with `release` and read with `acquire`.
//    Data of others must also be read before this rank stores its next word. A release does that,
//    because it keeps earlier reads before it. A fence keeps these reads before the abort words.
// 2. The own stamp before the look for sleepers. A sequentially consistent fence is between the two.
//    The rank that falls asleep has another one.
static inline uint64_t look(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void show(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// A type with such members, and nothing else. Classes of Python are based on it.
#define BASE(Type, lower, text, ...)                                                     \
    static PyMemberDef lower##_members[] = {__VA_ARGS__, {0}};                           \
    static PyType_Slot lower##_slots[] = {                                               \
        {Py_tp_members, lower##_members}, {Py_tp_doc, text}, {0, NULL}};                 \
    static PyType_Spec lower##_spec = {.name = "aiodist._core." #Type,                   \
                                       .basicsize = sizeof(Type),                        \
                                       .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, \
                                       .slots = lower##_slots}

// What a lane knows of its operation. The members are those of `aiodist.shared_memory.lane.Row`.
typedef struct {
    PyObject_HEAD
    long long seq, phase, base, publishes, known;
    unsigned long long digest;
    char entered, agreed;
} Row;

BASE(Row, row, "What a lane knows of the operation whose turn it is.",
     {"_seq", T_LONGLONG, offsetof(Row, seq), 0, NULL},
     {"_phase", T_LONGLONG, offsetof(Row, phase), 0, NULL},
     {"_base", T_LONGLONG, offsetof(Row, base), 0, NULL},
     {"_publishes", T_LONGLONG, offsetof(Row, publishes), 0, NULL},
     {"_known", T_LONGLONG, offsetof(Row, known), 0, NULL},
     {"_digest", T_ULONGLONG, offsetof(Row, digest), 0, NULL},
     {"_entered", T_BOOL, offsetof(Row, entered), 0, NULL},
     {"_agreed", T_BOOL, offsetof(Row, agreed), 0, NULL});

// How a rank sleeps. The members are those of `aiodist.shared_memory.board.Naps`.
typedef struct {
    PyObject_HEAD
    long long nap;
    unsigned long long slept;
    char can_doze;
} Naps;

BASE(Naps, naps, "How a rank sleeps.",
     {"_nap", T_LONGLONG, offsetof(Naps, nap), 0, NULL},
     {"_slept", T_ULONGLONG, offsetof(Naps, slept), 0, NULL},
     {"can_doze", T_BOOL, offsetof(Naps, can_doze), 0, NULL});

// What a rank knows of its own ring of posts, and of the ring of another rank. The members are those
// of `aiodist.shared_memory.posts.Ring` and `Cursor`.
typedef struct {
    Naps naps;
    long long head, base, before, limit;
} Ring;
typedef struct {
    PyObject_HEAD
    long long taken, at, held;
    unsigned long long given_up;
} Cursor;

BASE(Ring, ring, "What a rank knows of its posts.",
     {"_head", T_LONGLONG, offsetof(Ring, head), 0, NULL},
     {"_base", T_LONGLONG, offsetof(Ring, base), 0, NULL},
     {"_before", T_LONGLONG, offsetof(Ring, before), 0, NULL},
     {"_limit", T_LONGLONG, offsetof(Ring, limit), 0, NULL});
BASE(Cursor, cursor, "How far posts were read.",
     {"taken", T_LONGLONG, offsetof(Cursor, taken), 0, NULL},
     {"at", T_LONGLONG, offsetof(Cursor, at), 0, NULL},
     {"given_up", T_ULONGLONG, offsetof(Cursor, given_up), 0, NULL},
     {"held", T_LONGLONG, offsetof(Cursor, held), 0, NULL});

// How long the calls of one endpoint poll. Members are those of `aiodist.transports.polling.Pace`.
typedef struct {
    PyObject_HEAD
    char polls;
    int in_vain, dozed_in_vain;
    double due, parts_at;
} Pace;

BASE(Pace, pace, "How long calls poll.",
     {"polls", T_BOOL, offsetof(Pace, polls), 0, NULL},
     {"_in_vain", T_INT, offsetof(Pace, in_vain), 0, NULL},
     {"_dozed_in_vain", T_INT, offsetof(Pace, dozed_in_vain), 0, NULL},
     {"_due", T_DOUBLE, offsetof(Pace, due), 0, NULL},
     {"_parts_at", T_DOUBLE, offsetof(Pace, parts_at), 0, NULL});

// Bytes that were moved. The members are those of `aiodist.links.moved.MovedCounts`.
typedef struct {
    PyObject_HEAD
    long long sent, received;
} Counts;

BASE(Counts, counts, "Bytes that were moved.",
     {"sent", T_LONGLONG, offsetof(Counts, sent), 0, NULL},
     {"received", T_LONGLONG, offsetof(Counts, received), 0, NULL});

// The rings of a link, and their memory as long as the link has it. The members are those of
// `aiodist.transports.shm_rings.RingState`, which says what they are.
typedef struct {
    PyObject_HEAD
    unsigned long long written, origin, limit, rung, read, peer_origin, seen, given, granted, sleeps;
    long long sent, received;
    Py_buffer own, peer;
    uint64_t *words;        // NULL: the link has ended
    const uint64_t *others;
} Rings;

enum { WORDS_OF_RING = 4096 };  // bytes before the ring
enum { R_WRITTEN = 0, R_ORIGIN = 1, R_READ = 16, R_ASLEEP = 17, R_WANTED = 18, R_CORE = 20, R_THREAD = 21 };

static void detach(Rings *rings) {
    rings->words = NULL;
    rings->others = NULL;
    PyBuffer_Release(&rings->own);
    PyBuffer_Release(&rings->peer);
}

static PyObject *rings_detach(Rings *rings, PyObject *nothing) {
    detach(rings);
    Py_RETURN_NONE;
}

// attach(own, peer)
static PyObject *rings_attach(Rings *rings, PyObject *args) {
    PyObject *own, *peer;
    if (!PyArg_ParseTuple(args, "OO", &own, &peer)) return NULL;
    detach(rings);
    if (PyObject_GetBuffer(own, &rings->own, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(peer, &rings->peer, PyBUF_SIMPLE) < 0)
        return NULL;
    if (rings->own.len != rings->peer.len || rings->own.len <= WORDS_OF_RING) {
        detach(rings);
        PyErr_SetString(PyExc_ValueError, "two segments of the same size have rings");
        return NULL;
    }
    rings->words = rings->own.buf;
    rings->others = rings->peer.buf;
    Py_RETURN_NONE;
}

static void rings_dealloc(Rings *rings) {
    PyTypeObject *type = Py_TYPE(rings);
    detach(rings);
    type->tp_free(rings);
    Py_DECREF(type);
}

static PyMethodDef rings_methods[] = {
    {"attach", (PyCFunction)rings_attach, METH_VARARGS, "attach(own, peer)\n--\n\nUse these segments."},
    {"detach", (PyCFunction)rings_detach, METH_NOARGS, "detach()\n--\n\nUse them no more."},
    {0},
};
#define OF_RINGS(name, field) {name, T_ULONGLONG, offsetof(Rings, field), 0, NULL}
static PyMemberDef rings_members[] = {
    OF_RINGS("_written", written), OF_RINGS("_origin", origin), OF_RINGS("_limit", limit),
    OF_RINGS("_rung", rung),       OF_RINGS("read", read),      OF_RINGS("origin", peer_origin),
    OF_RINGS("_seen", seen),       OF_RINGS("_given", given),   OF_RINGS("_granted", granted),
    OF_RINGS("_sleeps", sleeps),
    {"sent", T_LONGLONG, offsetof(Rings, sent), 0, NULL},
    {"received", T_LONGLONG, offsetof(Rings, received), 0, NULL},
    {0},
};
static PyType_Slot rings_slots[] = {
    {Py_tp_dealloc, rings_dealloc}, {Py_tp_methods, rings_methods}, {Py_tp_members, rings_members},
    {Py_tp_doc, "What one side knows of the rings of a link."}, {0, NULL}};
static PyType_Spec rings_spec = {.name = "aiodist._core.Rings",
                                 .basicsize = sizeof(Rings),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                 .slots = rings_slots};

// Credit of all tags. The members are those of `aiodist.p2p.credit.Debt`.
typedef struct {
    PyObject_HEAD
    long long total, owed;
} Debt;

BASE(Debt, debt, "What messages cost.",
     {"_total", T_LONGLONG, offsetof(Debt, total), 0, NULL},
     {"_owed_total", T_LONGLONG, offsetof(Debt, owed), 0, NULL});

// Messages that are pushed. The members are those of `aiodist.p2p.credit.Pushes`.
typedef struct {
    PyObject_HEAD
    long long sid;
    char may_push;
} Pushes;

BASE(Pushes, pushes, "Which message comes next, and whether it may be pushed.",
     {"sid", T_LONGLONG, offsetof(Pushes, sid), 0, NULL},
     {"may_push", T_BOOL, offsetof(Pushes, may_push), 0, NULL});

// ---- values -------------------------------------------------------------------------------------

#define LEAVES 32  // the most arrays and numbers of a call that is known by its form

typedef struct {
    PyObject *owner;  // keeps the memory
    char *data;
    Py_ssize_t nbytes;
    int is_place;     // the result goes there
    char number[8];   // the memory of a number
} Leaf;

// The arrays and numbers of a call, in the order of its arguments. `post`: by rank, where its data is.
typedef struct {
    int count;
    char *post[FEW];
    PyObject *result;  // what was made of the values of all ranks; NULL: nothing
    Leaf leaf[LEAVES];
} Leaves;

static void drop_leaves(Leaves *leaves) {
    while (leaves->count) Py_DECREF(leaves->leaf[--leaves->count].owner);
    Py_CLEAR(leaves->result);
}

// Bytes `at` a place in shared memory, or those of the leaf `at_leaf`, or `nbytes` from `offset` on in
// the post of a `rank`. They are, or become, those of `with`, or those of the leaf `with_leaf` from
// `start` on.
typedef struct {
    Py_buffer at, with;
    int at_leaf, with_leaf, rank;
    Py_ssize_t start, offset, nbytes;
} Piece;

typedef struct {
    Py_ssize_t count;
    Piece *piece;
} Pieces;

// What one kind of call shows, and does with what others have shown.
typedef struct {
    PyObject *template;             // what is shown, as the Python code describes it
    Pieces shows, expects, moves;
    PyObject *makers;               // functions that make the values of the result; NULL: not known yet
    int is_listed;                  // the result is a list of these values
    PyObject *windows;              // what lies on the posts, by rank; NULL: there are no posts
} Values;

static void drop_pieces(Pieces *pieces) {
    while (pieces->count) {
        Piece *piece = &pieces->piece[--pieces->count];
        PyBuffer_Release(&piece->at);
        PyBuffer_Release(&piece->with);
    }
    PyMem_Free(pieces->piece);
    pieces->piece = NULL;
}

static void drop_values(Values *values) {
    if (!values) return;
    drop_pieces(&values->shows);
    drop_pieces(&values->expects);
    drop_pieces(&values->moves);
    Py_CLEAR(values->makers);
    Py_CLEAR(values->windows);
    Py_CLEAR(values->template);
    PyMem_Free(values);
}

// Memory, or the number of a leaf.
static int parse_end(PyObject *given, int how, Py_buffer *memory, int *leaf) {
    *leaf = -1;
    if (!PyLong_Check(given)) return PyObject_GetBuffer(given, memory, how);
    const long number = PyLong_AsLong(given);
    if (number < 0 || number >= LEAVES) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no such leaf");
        return -1;
    }
    *leaf = (int)number;
    return 0;
}

// A place in the post of one of the `ranks` is given as (rank, offset, nbytes).
static int parse_place_in_post(PyObject *given, int ranks, Piece *piece) {
    if (!PyArg_ParseTuple(given, "inn", &piece->rank, &piece->offset, &piece->nbytes)) return -1;
    if (piece->rank >= 0 && piece->rank < ranks && piece->offset >= 0 && piece->nbytes >= 0) return 0;
    PyErr_SetString(PyExc_ValueError, "there is no such place in a post");
    return -1;
}

// Pieces are given as (at, with), or (at, with, start). `ranks`: how many post.
static int parse_pieces(PyObject *given, int how, int ranks, Pieces *pieces) {
    pieces->piece = PyMem_Calloc(PyList_GET_SIZE(given) + 1, sizeof(Piece));
    if (!pieces->piece) return PyErr_NoMemory(), -1;
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(given); number++) {
        Piece *piece = &pieces->piece[pieces->count++];
        PyObject *at, *with;
        piece->at_leaf = piece->rank = -1;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(given, number), "OO|n", &at, &with, &piece->start) ||
            (PyTuple_Check(at) ? parse_place_in_post(at, ranks, piece)
                               : parse_end(at, how, &piece->at, &piece->at_leaf)) < 0 ||
            parse_end(with, PyBUF_SIMPLE, &piece->with, &piece->with_leaf) < 0)
            return -1;
        if (piece->rank < 0) piece->nbytes = piece->at.len;
        const int are_bytes = piece->at_leaf < 0 && piece->with_leaf < 0;
        if (piece->start < 0 || (are_bytes && piece->nbytes != piece->with.len)) {
            PyErr_SetString(PyExc_ValueError, "a piece of another length");
            return -1;
        }
    }
    return 0;
}

// Whether the leaves have the memory that these pieces need.
static int have_room(const Pieces *pieces, const Leaves *leaves) {
    for (Py_ssize_t number = 0; number < pieces->count; number++) {
        const Piece *piece = &pieces->piece[number];
        if (piece->at_leaf >= leaves->count || piece->with_leaf >= leaves->count) return 0;
        if (piece->with_leaf < 0) continue;
        const Py_ssize_t room = leaves->leaf[piece->with_leaf].nbytes;
        const Py_ssize_t length = piece->at_leaf < 0 ? piece->nbytes : leaves->leaf[piece->at_leaf].nbytes;
        if (piece->start > room || length > room - piece->start) return 0;
    }
    return 1;
}

// Whether all places are within the posts, of which each has so many bytes.
static int are_in_posts(const Pieces *pieces, const Py_ssize_t *lengths) {
    for (Py_ssize_t number = 0; number < pieces->count; number++) {
        const Piece *piece = &pieces->piece[number];
        if (piece->rank < 0) continue;
        const Py_ssize_t room = lengths[piece->rank];
        if (piece->offset > room || piece->nbytes > room - piece->offset) return 0;
    }
    return 1;
}

static int fit_posts(const Values *values, const Py_ssize_t *lengths) {
    return are_in_posts(&values->shows, lengths) && are_in_posts(&values->expects, lengths) &&
           are_in_posts(&values->moves, lengths);
}

static char *place_of(const Piece *piece, const Leaves *leaves) {
    if (piece->at_leaf >= 0) return leaves->leaf[piece->at_leaf].data;
    return piece->rank < 0 ? piece->at.buf : leaves->post[piece->rank] + piece->offset;
}

static void copy_pieces(const Pieces *pieces, const Leaves *leaves, int shows) {
    for (Py_ssize_t number = 0; number < pieces->count; number++) {
        const Piece *piece = &pieces->piece[number];
        const Leaf *leaf = piece->at_leaf < 0 ? NULL : &leaves->leaf[piece->at_leaf];
        char *at = place_of(piece, leaves), *with = piece->with.buf;
        if (piece->with_leaf >= 0) with = leaves->leaf[piece->with_leaf].data + piece->start;
        const Py_ssize_t nbytes = leaf ? leaf->nbytes : piece->nbytes;
        if (shows)
            copy_to_shared(at, with, nbytes);
        else
            memmove(with, at, nbytes);
    }
}

// Show what the call shows, or copy what others have shown to its places.
static void move_pieces(const Pieces *pieces, const Leaves *leaves, int shows, long long nbytes) {
    if (nbytes < ALONE) {
        copy_pieces(pieces, leaves, shows);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy_pieces(pieces, leaves, shows);
        Py_END_ALLOW_THREADS
    }
}

// Make the result of the values of all ranks. 1: it is made. 0: the Python code decides. -1: an error.
static int take_values(Values *values, Leaves *leaves, long long nbytes) {
    if (!values->makers || !have_room(&values->moves, leaves)) return 0;
    for (Py_ssize_t number = 0; number < values->expects.count; number++) {
        const Piece *piece = &values->expects.piece[number];
        if (memcmp(place_of(piece, leaves), piece->with.buf, piece->nbytes)) return 0;
    }
    move_pieces(&values->moves, leaves, 0, nbytes);
    PyObject *makers = Py_NewRef(values->makers);
    const Py_ssize_t count = PyTuple_GET_SIZE(makers);
    PyObject *made = values->is_listed && count ? PyList_New(count) : NULL;
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(makers, number));
        if (!value) break;
        if (made)
            PyList_SET_ITEM(made, number, value);
        else
            Py_XSETREF(leaves->result, value);
    }
    Py_DECREF(makers);
    if (PyErr_Occurred()) {
        Py_XDECREF(made);
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
        PyErr_Clear();  // a sum of numbers that is too large
        return 0;
    }
    if (made) Py_XSETREF(leaves->result, made);
    return 1;
}

// ---- tapes --------------------------------------------------------------------------------------

enum { DO_COPY, DO_REDUCE, DO_PUBLISH, DO_AWAIT, DO_SHOW, DO_TAKE };
enum { USER = 2 };  // arrays of the user: the input, and the destination of the result

typedef struct {
    int user;  // the index of the user's array; -1: the place is at `base`
    char *base;
    Py_ssize_t offset;
} Where;

typedef struct {
    int kind;
    long long count;    // DO_AWAIT: how often the others have published. Else: elements
    Where into;
    int operands;
    Where *from;
    PyObject *function;  // DO_SHOW and DO_TAKE: what does it for values of any form
} Step;

typedef struct {
    int cursor;  // the index of the own word that says how far the peer's posts were read
    Cursor *at;
} Peer;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *lane, *neighbours, *free, *fallback, *dtype, *ndarray, **names;
    Pace *progress;
    Naps *naps;
    Counts *moved;
    long long shown, taken;  // bytes that others see of this rank, and it of them
    PyObject *op, *call, *nbytes, *finish;  // see `Recipe`
    unsigned long long digest;
    int peers, held, polls, crowded, area, last, both, unended;
    int may_be_in_place;      // if this rank shows any of its arrays in place, Python does the call
    int *ranks;               // [0]: the own rank, then those of the others
    Py_buffer *buffers;       // [0]: the own words, then those of the others, then areas
    Py_ssize_t lengths[USER];
    const Entry *kernel;
    double size;
    int steps;
    Step *step;
    Where *places;            // places of all operands
    Values *values;           // NULL: it reduces, or functions do all the work
    unsigned taught;          // how often these were changed
    // A tape of posts has the `Posts` as its `lane`, and rings instead of areas in `buffers`.
    PyObject *express, *heads;  // the owner; by tag and rank, the first bytes of a post
    int reduces;
    // Where what this rank shows begins in its array, and by rank where what is reduced begins: in its
    // post, or for this rank in its array.
    Py_ssize_t shows_from, shows_most, part[FEW];
    Peer *posters;              // by peer; NULL: this is no tape of posts
    // Operations go round in the area: each begins so many bytes behind the last one. `begin`: where
    // this one does.
    Py_ssize_t apart, begin;
    int turns;
} Tape;

static Row *row_of(Tape *tape) { return (Row *)tape->lane; }
static uint64_t *own_words(Tape *tape) { return tape->buffers[0].buf; }
static uint64_t *words_of(Tape *tape, int peer) { return tape->buffers[1 + peer].buf; }

// Whether a rank is still missing: it has not reached the stamp, or has not posted.
static int is_missing(Tape *tape, int peer, long long stamp) {
    if (tape->posters)
        return look(words_of(tape, peer) + HEAD) == (uint64_t)tape->posters[peer].at->taken;
    return look(words_of(tape, peer) + STAMP) < (uint64_t)stamp;
}

static int reached(void *of, long long stamp) {
    Tape *tape = of;
    for (int peer = 0; peer < tape->peers; peer++)
        if (is_missing(tape, peer, stamp)) return 0;
    return 1;
}

// ---- waiting: the same as in aiodist.transports.polling, which gives the reasons ----------------

#define LONGEST 100e-6
#define SHORTEST 5e-6
#define AGAIN 8
#define OTHERS 10e-6
#define ALONE_SECONDS 10e-6
#define APART 30e-6
#define HOGGED 2e-3
#define A_WHILE 1.0
#define DOZE 5
#define HELD 1e-3
#define LOOKS 16  // looks at words for each look at the clock

#if defined(__linux__)
static int here(void) { return sched_getcpu() + 1; }
static void sleep_at(const uint64_t *word, uint64_t seen, double seconds) {
    const struct timespec most = {0, (long)(seconds * 1e9)};
    Py_BEGIN_ALLOW_THREADS
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &most, NULL, 0);
    Py_END_ALLOW_THREADS
}
static void ring(const uint64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
#else
static int here(void) { return 0; }  // the system does not tell
static void sleep_at(const uint64_t *word, uint64_t seen, double seconds) {}
static void ring(const uint64_t *word) {}
#endif

static double patience(int tried) {
    if (tried >= AGAIN) return tried % AGAIN ? SHORTEST : LONGEST;
    const double seconds = LONGEST / (1 << tried);
    return seconds > SHORTEST ? seconds : SHORTEST;
}

// Call a method. Returns whether it returned True, or -1 for an error.
static int asks(PyObject *owner, PyObject *name, PyObject *first, PyObject *second) {
    PyObject *found = PyObject_CallMethodObjArgs(owner, name, first, second, NULL);
    const int is_true = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return is_true;
}

// One that waits: for what, and by what pace.
typedef struct {
    Pace *pace;
    PyObject *neighbours, **names;
    int (*is_there)(void *of, long long stamp);
    void *of;
} Waiter;

// Whether other programs compute on our cores: see `Neighbours`.
static int others_compute(const Waiter *waiter, double t) {
    PyObject *seen = PyObject_GetAttr(waiter->neighbours, waiter->names[SEEN]);
    const double at = seen ? PyFloat_AsDouble(seen) : 0;
    Py_XDECREF(seen);
    if (PyErr_Occurred()) PyErr_Clear();
    return at > 0 && t >= at && t - at < A_WHILE;
}

// -1: an error, such as that of a handler of a signal that came meanwhile.
static int yielded(const Waiter *waiter, double since, double t) {
    if (t - since <= HOGGED) return 0;
    PyObject *noted = PyObject_CallMethod(waiter->neighbours, "yielded", "dd", since, t);
    Py_XDECREF(noted);
    return noted ? 0 : -1;
}

// `Progress.is_due`. -1: an error.
static int is_due(Pace *pace, PyObject **names, double held) {
    if (pace->polls && !isinf(pace->due)) return now() >= pace->due + held;
    return asks((PyObject *)pace, names[IS_DUE], NULL, NULL);
}

// `Progress._spin`. -1: an error.
static int spin(const Waiter *waiter, long long stamp, int crowded, double alone, double hogged,
                double due) {
    Pace *pace = waiter->pace;
    double t = now(), limit = t + patience(pace->in_vain);
    alone += crowded ? t : t + ALONE_SECONDS;
    if (!crowded && others_compute(waiter, t)) {
        alone = INFINITY;
        limit = t + SHORTEST;
    }
    while (t < due) {
        const int yields = t >= alone;
        if (yields) sched_yield();
        for (int looks = yields ? 1 : LOOKS; looks; looks--) {
            if (waiter->is_there(waiter->of, stamp)) {
                pace->in_vain = 0;
                return yields && yielded(waiter, t, now()) < 0 ? -1 : 1;
            }
#if defined(__x86_64__) || defined(__i386__)
            if (!yields) __builtin_ia32_pause();
#endif
        }
        const double before = t, away = (t = now()) - before;
        if (away > OTHERS) limit += away;
        if (yielded(waiter, before, t) < 0) return -1;
        if (t > limit || away > hogged) {
            pace->in_vain++;
            break;
        }
    }
    return 0;
}

// Sleep until the first missing rank has come: `Board.doze` and `Posts.doze`.
static void nap(Tape *tape, long long stamp, double seconds) {
    uint64_t *own = own_words(tape);
    Naps *naps = tape->naps;
    int peer = 0;
    while (peer < tape->peers && !is_missing(tape, peer, stamp)) peer++;
    if (peer == tape->peers) return;
    const int posts = tape->posters != NULL, asleep = posts ? NAP : ASLEEP;
    const uint64_t dozes = 1 + (uint64_t)tape->ranks[1 + peer];
    naps->nap++;
    if (!posts) show(own + WANTED, (uint64_t)stamp);
    if (naps->slept != dozes) {
        naps->slept = dozes;
        show(own + (posts ? DOZES : HOW), dozes);
    }
    show(own + asleep, (uint64_t)naps->nap);
    fence();
    const uint64_t *word = words_of(tape, peer) + (posts ? HEAD : STAMP);
    const uint64_t seen = look(word);
    if (posts ? seen == (uint64_t)tape->posters[peer].at->taken : seen < (uint64_t)stamp)
        sleep_at(word, seen, seconds);
    show(own + asleep, 0);
}

// `Progress._doze`.
static int doze(Tape *tape, long long stamp, double due) {
    Pace *pace = tape->progress;
    double t = now(), until = t + DOZE * patience(pace->dozed_in_vain);
    if (until > due || tape->crowded) until = due;
    for (; t < until; t = now()) {
        nap(tape, stamp, until - t);
        if (reached(tape, stamp)) {
            pace->dozed_in_vain = 0;
            return 1;
        }
    }
    pace->dozed_in_vain++;
    return 0;
}

// `Lane.watch` or `PostExpress.follows`. Loops of virtual time need it, because other ranks run then.
static int watch_virtually(Tape *tape, long long count) {
    if (!tape->posters) {
        PyObject *others = PyObject_GetAttrString(tape->lane, "others");
        PyObject *number = others ? PyLong_FromLongLong(count) : NULL;
        const int there = number ? asks(tape->lane, tape->names[WATCH], others, number) : -1;
        Py_XDECREF(number);
        Py_XDECREF(others);
        return there;
    }
    int there = 1;
    for (int peer = 0; there > 0 && peer < tape->peers; peer++)
        if (is_missing(tape, peer, 0))
            there = asks(tape->express, tape->names[FOLLOWS], (PyObject *)tape->posters[peer].at, NULL);
    return there;
}

// `Progress.part`. -1: an error.
static int part(Tape *tape) {
    const uint64_t *own = own_words(tape);
    PyObject *where = PyList_New(0);
    for (int at = 0; where && at <= tape->peers; at++) {
        const uint64_t *words = at ? words_of(tape, at - 1) : own;
        if (at && look(words + THREAD) == own[THREAD]) continue;
        PyObject *pair = Py_BuildValue("iK", tape->ranks[at], (unsigned long long)look(words + CORE));
        if (!pair || PyList_Append(where, pair) < 0) Py_CLEAR(where);
        Py_XDECREF(pair);
    }
    const int done = where ? asks((PyObject *)tape->progress, tape->names[PART], where, NULL) : -1;
    Py_XDECREF(where);
    return done;
}

// `Progress.watch`: poll until all others reach a stamp, or post, for a moment. -1: an error.
static int watch(Tape *tape, long long stamp, long long count) {
    if (reached(tape, stamp)) return 1;
    if (!tape->progress->polls) return watch_virtually(tape, count);
    if (!tape->polls) return 0;
    const Waiter waiter = {tape->progress, tape->neighbours, tape->names, reached, tape};
    const int due = is_due(tape->progress, tape->names, 0), can_doze = tape->naps->can_doze;
    if (due < 0) return -1;
    if (due && !tape->crowded) return spin(&waiter, stamp, 0, 0, HOGGED, now() + HELD);
    const uint64_t at = (uint64_t)here();
    int near = !at;
    if (own_words(tape)[CORE] != at) show(own_words(tape) + CORE, at);
    for (int peer = 0; peer < tape->peers; peer++) {
        const uint64_t core = look(words_of(tape, peer) + CORE);
        if ((!core || core == at) && is_missing(tape, peer, stamp)) near = 1;
    }
    if (near && now() >= tape->progress->parts_at && part(tape) < 0) return -1;
    const double until = tape->progress->due + (tape->crowded ? HELD : 0);
    int found = 0;
    if (near || tape->crowded) {
        found = spin(&waiter, stamp, 1, near ? 0 : APART, can_doze ? OTHERS : HOGGED, until);
    } else if (!(can_doze && others_compute(&waiter, now()))) {
        found = spin(&waiter, stamp, 0, 0, HOGGED, until);
    }
    return found || !can_doze ? found : doze(tape, stamp, until);
}

// 1: all others have published so often, and called the same. 0: not yet, or no. -1: an error.
static int wait_for(Tape *tape, long long count) {
    Row *row = row_of(tape);
    const long long stamp = row->base + count;
    // Give the loop its turn between two pieces, even if the next piece is there.
    int there = count > 1 ? is_due(tape->progress, tape->names, 0) : 0;
    if (there) return there < 0 ? -1 : 0;
    there = watch(tape, stamp, count);
    if (there <= 0) return there;
    row->known = stamp;
    if (!row->agreed) {
        const int word = CALL + (int)(row->seq & 1);
        for (int peer = 0; peer < tape->peers; peer++)
            if (look(words_of(tape, peer) + word) != row->digest) return 0;
        row->agreed = 1;
    }
    return 1;
}

// Whether everything is there that a rank sleeps for: see `Board._completes`.
static int completes(Tape *tape, int sleeper, uint64_t wanted, uint64_t needs) {
    if (needs) return needs == 1 + (uint64_t)tape->ranks[0];
    for (int peer = 0; peer < tape->peers; peer++)
        if (peer != sleeper && look(words_of(tape, peer) + STAMP) < wanted) return 0;
    return 1;
}

// Write that this rank has reached a stamp, and wake the ranks that sleep for it. -1: an error.
static int reach(Tape *tape, long long stamp) {
    show(own_words(tape) + STAMP, (uint64_t)stamp);
    fence();
    uint64_t rung = 0;
    for (int peer = 0; peer < tape->peers; peer++) {
        const uint64_t *words = words_of(tape, peer);
        if (!look(words + ASLEEP)) continue;
        const uint64_t wanted = look(words + WANTED), how = look(words + HOW);
        const uint64_t dozes = how & 0xffffffff;
        if (wanted > (uint64_t)stamp || !completes(tape, peer, wanted, how >> 32)) continue;
        if (!dozes) {  // a frame wakes it
            PyObject *number = PyLong_FromLongLong(stamp);
            if (!number) return -1;
            PyObject *done = PyObject_CallMethodOneArg(tape->lane, tape->names[ROUSE], number);
            Py_DECREF(number);
            Py_XDECREF(done);
            return done ? 0 : -1;
        }
        for (int at = 0; dozes != rung && at <= tape->peers; at++)
            if (dozes == 1 + (uint64_t)tape->ranks[at]) ring((uint64_t *)tape->buffers[at].buf + STAMP);
        rung = dozes;
    }
    return 0;
}

// 1: the phase is over. 0: the Python code must find out what is wrong. -1: an error.
static int end_phase(Tape *tape) {
    Row *row = row_of(tape);
    if (!row->agreed) return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);  // reads all data before the abort words
    const int word = ABORTED + (int)(row->seq & 1);
    for (int peer = 0; peer < tape->peers; peer++)
        if (look(words_of(tape, peer) + word) == (uint64_t)(row->seq + 1)) return 0;
    const long long over = row->base + A_PHASE;
    PyObject *number = PyLong_FromLongLong(over);
    if (!number) return -1;
    if (PyList_SetItem(tape->free, tape->area, number) < 0) return -1;
    return tape->last && reach(tape, over) < 0 ? -1 : 1;
}

static char *place(const Tape *tape, const Where *where, char *const *user) {
    return (where->user < 0 ? where->base + tape->begin : user[where->user]) + where->offset;
}

static void do_step(Tape *tape, const Step *step, char *const *user) {
    const Py_ssize_t length = (Py_ssize_t)step->count, itemsize = tape->kernel->itemsize;
    const int is_shared = step->into.user < 0;
    char *into = place(tape, &step->into, user);
    if (step->kind == DO_COPY) {
        if (is_shared)
            copy_to_shared(into, place(tape, step->from, user), length * itemsize);
        else
            memcpy(into, place(tape, step->from, user), length * itemsize);
        return;
    }
    void *places[FEW];
    for (int k = 0; k < step->operands; k++) places[k] = place(tape, &step->from[k], user);
    if (!is_shared || length * itemsize < STREAMED || !streams()) {
        tape->kernel->run(into, places, step->operands, length, tape->size);
        return;
    }
    char block[8 * BLOCK] __attribute__((aligned(64)));
    const Py_ssize_t most = (Py_ssize_t)sizeof block / itemsize;
    for (Py_ssize_t at = 0; at < length; at += most) {
        const Py_ssize_t now = length - at < most ? length - at : most;
        tape->kernel->run(block, places, step->operands, now, tape->size);
        copy_to_shared(into + at * itemsize, block, now * itemsize);
        for (int k = 0; k < step->operands; k++) places[k] = (char *)places[k] + now * itemsize;
    }
}

// NO_ROOM: nothing was done. UNKNOWN: the Python code has to do the last step.
enum { ALL_DONE = -1, FAILED = -2, NO_ROOM = -3, UNKNOWN = -4 };

// Call a function of the plan. It returns True to go on, or else the number of steps that are done.
static int do_call(PyObject *function, PyObject *given) {
    PyObject *found = PyObject_CallOneArg(function, given);
    if (!found) return FAILED;
    const long done = found == Py_True ? ALL_DONE : PyLong_AsLong(found);
    Py_DECREF(found);
    return done == -1 && PyErr_Occurred() ? FAILED : (int)done;
}

// Run the steps from the number `at` on. Returns how many are done, or one of the above.
static int run_tape(Tape *tape, PyObject *given, char *const *user, Leaves *leaves, int at) {
    Row *row = row_of(tape);
    tape->begin = (row->seq >> 1) % tape->turns * tape->apart;  // as in `board.in_round`
    for (; at < tape->steps; at++) {
        const Step *step = &tape->step[at];
        if (step->kind == DO_PUBLISH) {
            if (reach(tape, row->base + ++row->publishes) < 0) return FAILED;
        } else if (step->kind == DO_AWAIT) {
            const int there = wait_for(tape, step->count);
            if (there < 0) return FAILED;
            if (!there) return at;
        } else if (step->kind == DO_SHOW && leaves) {
            move_pieces(&tape->values->shows, leaves, 1, tape->shown);
        } else if (step->kind == DO_TAKE && leaves) {
            const int taken = take_values(tape->values, leaves, tape->taken);
            if (taken <= 0) return taken ? FAILED : UNKNOWN;
        } else if (step->kind >= DO_SHOW) {
            const int done = do_call(step->function, given);
            if (done != ALL_DONE) return done;
        } else if (step->count * tape->kernel->itemsize * step->operands < ALONE) {
            do_step(tape, step, user);
        } else {
            Py_BEGIN_ALLOW_THREADS
            do_step(tape, step, user);
            Py_END_ALLOW_THREADS
        }
    }
    const int over = end_phase(tape);
    if (over < 0) return FAILED;
    if (!over) return tape->unended;
    tape->moved->sent += tape->shown;
    tape->moved->received += tape->taken;
    return ALL_DONE;
}

// ---- posts --------------------------------------------------------------------------------------

enum { POSTED = 0 };

// Show the posts and wake the ranks that sleep for them: `Posts.tell` and `PostExpress.wake`.
// 1: no rank is lost. -1: an error.
static int tell(Tape *tape) {
    uint64_t *own = own_words(tape);
    show(own + HEAD, (uint64_t)((Ring *)tape->lane)->head);
    fence();
    int framed = 0, dozed = 0;
    for (int peer = 0; peer < tape->peers; peer++) {
        if (!look(words_of(tape, peer) + NAP)) continue;
        const uint64_t dozes = look(words_of(tape, peer) + DOZES);
        framed |= !dozes;
        dozed |= dozes == 1 + (uint64_t)tape->ranks[0];
    }
    if (dozed) ring(own + HEAD);
    if (!framed) return 1;
    PyObject *woken = PyObject_CallMethodNoArgs(tape->lane, tape->names[TELL]);
    if (!woken) return -1;
    const int goes_on =
        PyObject_Size(woken) ? asks(tape->express, tape->names[WAKE], woken, NULL) : 1;
    Py_DECREF(woken);
    return goes_on;
}

// A post as it is expected of a rank: `head` is what it begins with, `start` where its data does.
typedef struct {
    const char *head;
    Py_ssize_t length, start, whole, nbytes;
} Post;

// Read what posts look like, by rank. 0, or -1 for an error.
static int find_posts(const Tape *tape, PyObject *heads, Post *posts) {
    int are_sound = PyTuple_Check(heads) && PyTuple_GET_SIZE(heads) == tape->peers + 1;
    for (int rank = 0; are_sound && rank <= tape->peers; rank++) {
        PyObject *head = PyTuple_GET_ITEM(heads, rank);
        Post *post = &posts[rank];
        uint32_t whole, nbytes;
        if (!(are_sound = PyBytes_Check(head) && PyBytes_GET_SIZE(head) >= NUMBER_AT + 8)) break;
        post->head = PyBytes_AS_STRING(head);
        post->length = PyBytes_GET_SIZE(head);
        memcpy(&whole, post->head, sizeof whole);
        memcpy(&nbytes, post->head + LENGTH_AT, sizeof nbytes);
        post->whole = whole;
        post->nbytes = nbytes;
        post->start = post->whole - ((post->nbytes + UNIT - 1) & -UNIT);
        are_sound = post->start > NUMBER_AT && post->start <= post->length && post->length <= post->whole;
    }
    if (!are_sound) PyErr_SetString(PyExc_ValueError, "what comes before the data of a post is not known");
    return are_sound ? 0 : -1;
}

// Find room for a post of so many bytes. Returns NULL if there is none, or for an error.
static char *find_room(Tape *tape, Py_ssize_t whole) {
    Ring *ring = (Ring *)tape->lane;
    const Py_buffer *memory = &tape->buffers[1 + tape->peers + tape->ranks[0]];
    long long at = ring->head - ring->base;
    if (at + whole > ring->limit) {
        PyObject *length = PyLong_FromSsize_t(whole), *found = NULL;
        if (length) found = PyObject_CallMethodOneArg(tape->lane, tape->names[FIND], length);
        Py_XDECREF(length);
        if (!found) return NULL;
        at = PyLong_AsLongLong(found);
        Py_DECREF(found);
    }
    return at < 0 || at + whole > memory->len ? NULL : (char *)memory->buf + at;
}

// Find the next post of each other rank. 1: all are as expected. 0: one is not.
static int are_expected(Tape *tape, const Post *posts, int64_t number, char **data) {
    for (int peer = 0; peer < tape->peers; peer++) {
        Cursor *reading = tape->posters[peer].at;
        const int rank = tape->ranks[1 + peer];
        const Post *post = &posts[rank];
        if (look(words_of(tape, peer) + LAP) == (uint64_t)reading->taken) reading->at = 0;
        const Py_buffer *memory = &tape->buffers[1 + tape->peers + rank];
        if (reading->at < 0 || reading->at + post->whole > memory->len) return 0;
        char *found = (char *)memory->buf + reading->at;
        const Py_ssize_t behind = NUMBER_AT + sizeof number;
        if (memcmp(found, post->head, NUMBER_AT) || memcmp(found + NUMBER_AT, &number, sizeof number) ||
            memcmp(found + behind, post->head + behind, post->length - behind))
            return 0;
        data[rank] = found + post->start;
    }
    return 1;
}

// Lay the windows on the data of all posts, for what makes the result. -1: an error.
static int lay_windows(Tape *tape, PyObject *windows, char *const *data) {
    int failed = 0;
    Py_INCREF(windows);
    for (int rank = 0; !failed && rank < PyTuple_GET_SIZE(windows); rank++) {
        PyObject *window = PyTuple_GET_ITEM(windows, rank);
        const Py_buffer *memory = &tape->buffers[1 + tape->peers + rank];
        PyObject *start = PyLong_FromSsize_t(data[rank] - (char *)memory->buf);
        failed = !start || PyObject_SetAttr(window, tape->names[AREA], memory->obj) < 0 ||
                 PyObject_SetAttr(window, tape->names[START], start) < 0;
        Py_XDECREF(start);
    }
    Py_DECREF(windows);
    return failed ? -1 : 0;
}

// Post, and do with the posts of all what the call does. ALL_DONE, or POSTED if nothing was read, or
// another one of these numbers. Values are those of `leaves`. Else arrays of the `user` are reduced:
// the first one into the second, which may be the same.
// `heads`: what the posts begin with, as the tape was `taught`.
static int run_posts(Tape *tape, PyObject *heads, unsigned taught, int64_t number, char *const *user,
                     Leaves *leaves) {
    Ring *ring = (Ring *)tape->lane;
    const int own = tape->ranks[0];
    Post posts[FEW];
    if (find_posts(tape, heads, posts) < 0) return FAILED;
    const Post *mine = &posts[own];
    char *post = find_room(tape, mine->whole);
    if (!post && PyErr_Occurred()) return FAILED;
    // Python code may have run, and taught the tape other values.
    if (!post || tape->taught != taught) return NO_ROOM;
    Values *const values = leaves ? tape->values : NULL;
    char *places[FEW], **const data = values ? leaves->post : places;
    Py_ssize_t lengths[FEW] = {0}, all = 0;
    const Py_ssize_t from_user = mine->start + mine->nbytes - mine->length;
    int fit = values || (from_user >= 0 && from_user <= tape->shows_most);
    for (int rank = 0; rank <= tape->peers; rank++) {
        all += lengths[rank] = posts[rank].nbytes;
        fit &= values || posts[rank].nbytes == tape->shown;
    }
    if (!fit || (values && !fit_posts(values, lengths))) {
        PyErr_SetString(PyExc_ValueError, "the posts have other lengths");
        return FAILED;
    }
    memcpy(post, mine->head, mine->length);
    memcpy(post + NUMBER_AT, &number, sizeof number);
    data[own] = post + mine->start;
    if (values)
        move_pieces(&values->shows, leaves, 1, mine->nbytes);
    else
        copy_to_shared(post + mine->length, user[0] + tape->shows_from, from_user);
    ring->head += mine->whole;
    int there = tell(tape);
    if (there > 0) there = watch(tape, 0, 0);
    if (there <= 0) return there < 0 ? FAILED : POSTED;
    // A call that has waited may have ended meanwhile, and learnt other values.
    if (tape->taught != taught || !are_expected(tape, posts, number, data)) return values ? UNKNOWN : POSTED;
    long long read[FEW];
    for (int peer = 0; peer < tape->peers; peer++) read[peer] = tape->posters[peer].at->taken;
    int taken = 1;
    if (values) {
        taken = lay_windows(tape, values->windows, data) < 0 ? -1 : take_values(values, leaves, all);
        if (!taken) return UNKNOWN;
    } else if (tape->reduces) {
        void *operands[FEW];
        for (int rank = 0; rank <= tape->peers; rank++)
            operands[rank] = (rank == own ? user[0] : data[rank]) + tape->part[rank];
        tape->kernel->run(user[1], operands, tape->peers + 1, tape->lengths[1], tape->size);
    }
    for (int peer = 0; peer < tape->peers; peer++) {
        Cursor *reading = tape->posters[peer].at;
        if (reading->taken != read[peer]) continue;  // a call that was made meanwhile has moved on
        reading->at += posts[tape->ranks[1 + peer]].whole;
        reading->taken += posts[tape->ranks[1 + peer]].whole;
        // A release, so the data is read before the cursor says that it may be overwritten.
        show(own_words(tape) + tape->posters[peer].cursor, (uint64_t)reading->taken);
    }
    tape->moved->sent += mine->nbytes;
    tape->moved->received += all - mine->nbytes;
    return taken < 0 ? FAILED : ALL_DONE;
}

// Do the same without a tape, by a function that takes the tag, the number and the arguments. It is
// told if this rank has posted, and all others have posted something.
static int run_function(Tape *tape, PyObject *tag, PyObject *number, PyObject *x, PyObject *given,
                        int has_posted) {
    PyObject *args[] = {tag, number, x, given, Py_True};
    PyObject *found = PyObject_Vectorcall(tape->fallback, args, has_posted ? 5 : 4, NULL);
    if (!found) return FAILED;
    const int done = found == Py_None ? NO_ROOM : PyObject_IsTrue(found) ? ALL_DONE : POSTED;
    Py_DECREF(found);
    return done;
}

// Whether a rank has given a call up since the last time this was asked.
static int is_given_up(Tape *tape) {
    for (int peer = 0; peer < tape->peers; peer++)
        if (look(words_of(tape, peer) + GIVEN_UP) != tape->posters[peer].at->given_up) return 1;
    return 0;
}

// ---- tapes in Python ----------------------------------------------------------------------------

// The memory of an array that the tape is made for. NULL: it is made for other arrays.
static char *memory_of(Tape *tape, PyObject *given, int which) {
    const Array *array = (Array *)given;
    if ((PyObject *)Py_TYPE(given) != tape->ndarray || array->descr != tape->dtype) return NULL;
    const int needed = which == tape->both ? PLAIN_ARRAY : CONTIGUOUS | ALIGNED;
    if ((array->flags & needed) != needed || array->nd != 1) return NULL;
    return array->dimensions[0] == tape->lengths[which] ? array->data : NULL;
}

// The same for one array, or for a tuple of two. 0: the tape is not made for them.
static int memories_of(Tape *tape, PyObject *given, char **user) {
    if (!tape->kernel) return 1;  // functions do all the work
    if (!tape->both) {
        user[0] = user[1] = memory_of(tape, given, 0);
        return user[0] != NULL;
    }
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) < USER) return 0;
    for (int which = 0; which < USER; which++)
        if (!(user[which] = memory_of(tape, PyTuple_GET_ITEM(given, which), which))) return 0;
    return 1;
}

static PyObject *tape_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *keywords) {
    Tape *tape = (Tape *)self;
    if (PyVectorcall_NARGS(nargsf) != 1 || keywords || tape->posters) {
        PyErr_SetString(PyExc_TypeError, "a tape takes what it is done with");
        return NULL;
    }
    char *user[USER];
    if (!memories_of(tape, args[0], user)) return PyObject_CallOneArg(tape->fallback, args[0]);
    const int done = run_tape(tape, args[0], user, NULL, 0);
    return done == FAILED ? NULL : PyLong_FromLong(done);
}

static int tape_traverse(Tape *tape, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(tape));
    Py_VISIT(tape->lane);
    Py_VISIT(tape->progress);
    Py_VISIT(tape->naps);
    Py_VISIT(tape->neighbours);
    Py_VISIT(tape->moved);
    Py_VISIT(tape->free);
    Py_VISIT(tape->fallback);
    Py_VISIT(tape->finish);
    Py_VISIT(tape->express);
    Py_VISIT(tape->heads);
    if (tape->values) {
        Py_VISIT(tape->values->makers);
        Py_VISIT(tape->values->windows);
        Py_VISIT(tape->values->template);
    }
    for (int at = 0; at < tape->steps; at++) Py_VISIT(tape->step[at].function);
    for (int peer = 0; tape->posters && peer < tape->peers; peer++) Py_VISIT(tape->posters[peer].at);
    return 0;
}

static int tape_clear(Tape *tape) {
    // These may be parts of a cycle.
    Py_CLEAR(tape->fallback);
    Py_CLEAR(tape->express);
    if (tape->values) Py_CLEAR(tape->values->makers);
    for (int at = 0; at < tape->steps; at++) Py_CLEAR(tape->step[at].function);
    return 0;
}

static void tape_dealloc(Tape *tape) {
    PyTypeObject *type = Py_TYPE(tape);
    PyObject_GC_UnTrack(tape);
    tape_clear(tape);
    drop_values(tape->values);
    while (tape->held) PyBuffer_Release(&tape->buffers[--tape->held]);
    PyMem_Free(tape->buffers);
    PyMem_Free(tape->step);
    PyMem_Free(tape->places);
    for (int peer = 0; tape->posters && peer < tape->peers; peer++)
        Py_XDECREF(tape->posters[peer].at);
    PyMem_Free(tape->posters);
    PyMem_Free(tape->ranks);
    Py_CLEAR(tape->progress);
    Py_CLEAR(tape->naps);
    Py_CLEAR(tape->moved);
    PyObject **const refs[] = {&tape->lane,  &tape->neighbours, &tape->free,   &tape->fallback,
                               &tape->dtype, &tape->ndarray,    &tape->op,     &tape->call,
                               &tape->nbytes, &tape->finish,    &tape->heads};
    for (size_t i = 0; i < sizeof refs / sizeof *refs; i++) Py_CLEAR(*refs[i]);
    type->tp_free(tape);
    Py_DECREF(type);
}

// A place in memory: (buffer, begin), in elements. The buffers are those of plans. Checks that
// `length` elements are there, and that a place to write to is writable.
static int parse_place(Tape *tape, PyObject *words, Py_ssize_t length, int written, Where *into) {
    const int itemsize = tape->kernel->itemsize;
    int buffer;
    Py_ssize_t start;
    if (!PyArg_ParseTuple(words, "in", &buffer, &start)) return -1;
    if (buffer == USER) buffer = -1;  // scratch, which no tape has
    const Py_ssize_t area = (Py_ssize_t)tape->peers + buffer - USER;
    if (buffer < 0 || area >= tape->held || start < 0 || length < 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such place");
        return -1;
    }
    const Py_ssize_t room =
        buffer < USER ? tape->lengths[buffer]
                      : (tape->buffers[area].len - (tape->turns - 1) * tape->apart) / itemsize;
    if (start > room || length > room - start) {
        PyErr_SetString(PyExc_ValueError, "a step goes beyond its memory");
        return -1;
    }
    if (written && buffer > USER && tape->buffers[area].readonly) {
        PyErr_SetString(PyExc_ValueError, "a step writes to the memory of another rank");
        return -1;
    }
    into->user = buffer < USER ? buffer : -1;
    into->base = buffer < USER ? NULL : tape->buffers[area].buf;
    into->offset = start * itemsize;
    return 0;
}

static int parse_steps(Tape *tape, PyObject *steps) {
    Py_ssize_t operands = 0;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(steps); at++) {
        PyObject *words = PyList_GET_ITEM(steps, at), *into, *from;
        Step *step = &tape->step[at];
        if (!PyArg_ParseTuple(words, "iLOO!", &step->kind, &step->count, &into, &PyList_Type, &from))
            return -1;
        if (step->kind >= DO_SHOW) step->function = Py_NewRef(into);
        tape->steps++;
        if (step->kind > DO_REDUCE) continue;
        if (!tape->kernel) {
            PyErr_SetString(PyExc_ValueError, "a step that needs a kernel");
            return -1;
        }
        const Py_ssize_t count = PyList_GET_SIZE(from);
        if (step->kind < 0 || count < 1 || count > FEW || (step->kind == DO_COPY && count > 1)) {
            PyErr_SetString(PyExc_ValueError, "a step with as many operands as no tape has");
            return -1;
        }
        operands += count;
    }
    tape->places = PyMem_New(Where, operands ? operands : 1);
    if (!tape->places) return PyErr_NoMemory(), -1;
    Where *next = tape->places;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(steps); at++) {
        PyObject *words = PyList_GET_ITEM(steps, at);
        Step *step = &tape->step[at];
        if (step->kind > DO_REDUCE) continue;
        PyObject *into = PyTuple_GET_ITEM(words, 2), *from = PyTuple_GET_ITEM(words, 3);
        if (parse_place(tape, into, (Py_ssize_t)step->count, 1, &step->into) < 0) return -1;
        step->operands = (int)PyList_GET_SIZE(from);
        step->from = next;
        for (int k = 0; k < step->operands; k++, next++)
            if (parse_place(tape, PyList_GET_ITEM(from, k), (Py_ssize_t)step->count, 0, next) < 0)
                return -1;
    }
    return 0;
}

// The ranks are in the order of the words.
static int parse_ranks(Tape *tape, PyObject *ranks) {
    tape->ranks = PyMem_Calloc(tape->peers + 1, sizeof(int));
    if (!tape->ranks) return PyErr_NoMemory(), -1;
    if (PyList_GET_SIZE(ranks) != tape->peers + 1) return PyErr_BadArgument(), -1;
    for (int at = 0; at <= tape->peers; at++) {
        const long rank = PyLong_AsLong(PyList_GET_ITEM(ranks, at));
        if (PyErr_Occurred()) return -1;
        if (rank < 0 || rank >= 1 << 30) return PyErr_BadArgument(), -1;
        tape->ranks[at] = (int)rank;
    }
    return 0;
}

// Each poster is given as (index of the cursor's word, reader).
static int parse_posters(Tape *tape, PyObject *posters, State *state) {
    tape->posters = PyMem_Calloc(tape->peers + 1, sizeof(Peer));
    if (!tape->posters) return PyErr_NoMemory(), -1;
    if (PyList_GET_SIZE(posters) != tape->peers) return PyErr_BadArgument(), -1;
    for (int peer = 0; peer < tape->peers; peer++) {
        Peer *poster = &tape->posters[peer];
        PyObject *reading;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(posters, peer), "iO!", &poster->cursor, state->cursor,
                              &reading))
            return -1;
        poster->at = (Cursor *)Py_NewRef(reading);
        if (tape->ranks[1 + peer] > tape->peers || poster->cursor < 400 || poster->cursor >= 512)
            return PyErr_BadArgument(), -1;
    }
    const int is_wrong = tape->peers + 1 > FEW || tape->held != 2 * tape->peers + 2 ||
                         tape->ranks[0] > tape->peers ||
                         tape->buffers[1 + tape->peers + tape->ranks[0]].readonly;
    return is_wrong ? (PyErr_BadArgument(), -1) : 0;
}

// None, or (where what is shown begins, [by rank, where what is reduced begins]).
static int parse_parts(Tape *tape, PyObject *parts) {
    const Py_ssize_t itemsize = tape->kernel ? tape->kernel->itemsize : 0;
    const Py_ssize_t all = tape->lengths[0] * itemsize, taken = tape->lengths[1] * itemsize;
    PyObject *begins = NULL;
    if (!tape->kernel) return 0;
    if (parts != Py_None && !PyArg_ParseTuple(parts, "nO!", &tape->shows_from, &PyList_Type, &begins))
        return -1;
    int is_wrong = (begins && PyList_GET_SIZE(begins) != tape->peers + 1) || tape->shows_from < 0;
    for (int rank = 0; !is_wrong && rank <= tape->peers; rank++) {
        const Py_ssize_t begin = begins ? PyLong_AsSsize_t(PyList_GET_ITEM(begins, rank)) : 0;
        const Py_ssize_t there = rank == tape->ranks[0] ? all : (Py_ssize_t)tape->shown;
        is_wrong = begin < 0 || begin > there - taken;
        tape->part[rank] = begin;
    }
    tape->shows_most = all - tape->shows_from;
    if (is_wrong && !PyErr_Occurred()) PyErr_BadArgument();
    return is_wrong ? -1 : 0;
}

static PyObject *tape_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *words[] = {"lane",   "progress", "naps",  "neighbours", "moved",   "free",   "fallback",
                            "dtype",  "shown",    "taken", "words",      "ranks",   "areas",  "steps",
                            "lengths", "kernel",  "size",  "area",       "polls",   "crowded", "last",
                            "op",     "call",     "digest", "nbytes",    "finish",  "unended", "posters",
                            "heads",  "express",  "reduces", "apart", "places", "may_be_in_place", "parts",
                            NULL};
    PyObject *lane, *progress, *naps, *neighbours, *moved, *free, *fallback, *dtype,
        *boards, *ranks, *areas, *steps, *op, *call, *nbytes, *finish, *posters = NULL, *heads = NULL,
        *express = NULL, *parts = Py_None;
    int reduces = 0, turns = 1, may_be_in_place = 0;
    Py_ssize_t apart = 0;
    unsigned long long digest;
    long long sent, received;
    Py_ssize_t lengths[USER];
    int kernel, area, polls, crowded, last, unended;
    double size;
    State *state = state_of(type);
    if (!state) return NULL;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "OO!O!OO!O!OOLLO!O!O!O!(nn)idipppO!O!KO!Oi|O!OOpnipO:Tape", words, &lane,
            state->pace, &progress, state->naps, &naps, &neighbours, state->counts, &moved,
            &PyList_Type, &free, &fallback, &dtype, &sent, &received, &PyList_Type, &boards,
            &PyList_Type, &ranks, &PyList_Type, &areas, &PyList_Type, &steps, &lengths[0],
            &lengths[1], &kernel, &size, &area, &polls, &crowded, &last, &PyUnicode_Type, &op,
            &PyBytes_Type, &call, &digest, &PyLong_Type, &nbytes, &finish, &unended, &PyList_Type,
            &posters, &heads, &express, &reduces, &apart, &turns, &may_be_in_place,
            &parts))
        return NULL;
    if (!PyObject_TypeCheck(lane, posters ? state->ring : state->row)) {
        PyErr_SetString(PyExc_TypeError, "a tape is for a lane");
        return NULL;
    }
    const Py_ssize_t pages = PyList_GET_SIZE(boards), all = pages + PyList_GET_SIZE(areas);
    if (pages < 1 || all > 1 << 16 || kernel >= COUNT || lengths[0] < 0 ||
        PyList_GET_SIZE(steps) > 1 << 16 || area < 0 || area >= PyList_GET_SIZE(free) || apart < 0 ||
        apart > 1 << 30 || turns < 1 || turns > 1 << 10) {
        PyErr_SetString(PyExc_ValueError, "no such tape can be made");
        return NULL;
    }
    Tape *tape = (Tape *)type->tp_alloc(type, 0);
    if (!tape) return NULL;
    tape->vectorcall = tape_call;
    tape->lane = Py_NewRef(lane);
    tape->progress = (Pace *)Py_NewRef(progress);
    tape->naps = (Naps *)Py_NewRef(naps);
    tape->neighbours = Py_NewRef(neighbours);
    tape->moved = (Counts *)Py_NewRef(moved);
    tape->free = Py_NewRef(free);
    tape->fallback = Py_NewRef(fallback);
    tape->dtype = Py_NewRef(dtype);
    tape->shown = sent;
    tape->taken = received;
    tape->ndarray = Py_NewRef(state->ndarray);
    tape->op = Py_NewRef(op);
    tape->call = Py_NewRef(call);
    tape->nbytes = Py_NewRef(nbytes);
    tape->finish = Py_NewRef(finish);
    tape->digest = digest;
    tape->names = state->names;
    tape->peers = (int)pages - 1;
    tape->kernel = kernel < 0 ? NULL : &entries[kernel];
    tape->size = size;
    tape->area = area;
    tape->apart = apart;
    tape->turns = turns;
    tape->polls = polls;
    tape->crowded = crowded;
    tape->last = last;
    tape->unended = unended;
    tape->may_be_in_place = may_be_in_place;
    tape->both = lengths[1] >= 0;
    memcpy(tape->lengths, lengths, sizeof lengths);
    if (!tape->both) tape->lengths[1] = lengths[0];
    tape->buffers = PyMem_New(Py_buffer, all);
    tape->step = PyMem_New(Step, PyList_GET_SIZE(steps) + 1);
    if (!tape->buffers || !tape->step) {
        PyErr_NoMemory();
        goto failed;
    }
    memset(tape->step, 0, sizeof(Step) * (PyList_GET_SIZE(steps) + 1));
    for (Py_ssize_t at = 0; at < all; at++) {
        PyObject *memory = at < pages ? PyList_GET_ITEM(boards, at) : PyList_GET_ITEM(areas, at - pages);
        const int how = at ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(memory, &tape->buffers[at], how) < 0) goto failed;
        tape->held++;
        if (at < pages && tape->buffers[at].len < 4096) {
            PyErr_SetString(PyExc_ValueError, "a board has 4096 bytes");
            goto failed;
        }
    }
    if (parse_ranks(tape, ranks) < 0 || parse_steps(tape, steps) < 0) goto failed;
    tape->reduces = reduces;
    if (posters && (!heads || !express)) {
        PyErr_BadArgument();
        goto failed;
    }
    tape->heads = Py_XNewRef(heads);
    tape->express = Py_XNewRef(express);
    if (posters && (parse_posters(tape, posters, state) < 0 || parse_parts(tape, parts) < 0)) goto failed;
    return (PyObject *)tape;
failed:
    Py_DECREF(tape);
    return NULL;
}

// How many ranks post. 0: this is no tape of posts.
static int posting(const Tape *tape) { return tape->posters ? tape->peers + 1 : 0; }

// shows(template, pieces)
static PyObject *tape_shows(Tape *tape, PyObject *args) {
    PyObject *template, *pieces;
    if (!PyArg_ParseTuple(args, "OO!", &template, &PyList_Type, &pieces)) return NULL;
    if (tape->posters ? tape->kernel != NULL
                      : tape->values || tape->steps != 4 || tape->step[3].kind != DO_TAKE) {
        PyErr_SetString(PyExc_ValueError, "this tape shows no values, or other ones");
        return NULL;
    }
    Values *values = PyMem_Calloc(1, sizeof(Values));
    if (!values) return PyErr_NoMemory();
    values->template = Py_NewRef(template);
    if (parse_pieces(pieces, PyBUF_WRITABLE, posting(tape), &values->shows) < 0) {
        drop_values(values);
        return NULL;
    }
    Values *const before = tape->values;
    tape->values = values;
    tape->taught++;
    drop_values(before);
    Py_RETURN_NONE;
}

// expects(pieces, moves, makers, is_listed, windows=None)
static PyObject *tape_expects(Tape *tape, PyObject *args) {
    PyObject *pieces, *moves, *makers, *windows = NULL;
    int is_listed;
    if (!PyArg_ParseTuple(args, "O!O!O!p|O!", &PyList_Type, &pieces, &PyList_Type, &moves, &PyTuple_Type,
                          &makers, &is_listed, &PyTuple_Type, &windows))
        return NULL;
    Values *values = tape->values;
    if (!values || (windows ? PyTuple_GET_SIZE(windows) : 0) != posting(tape)) {
        PyErr_SetString(PyExc_ValueError, "this tape shows no values");
        return NULL;
    }
    tape->taught++;
    Py_CLEAR(values->makers);
    Py_CLEAR(values->windows);
    drop_pieces(&values->expects);
    drop_pieces(&values->moves);
    if (parse_pieces(pieces, PyBUF_SIMPLE, posting(tape), &values->expects) < 0 ||
        parse_pieces(moves, PyBUF_SIMPLE, posting(tape), &values->moves) < 0)
        return NULL;
    for (Py_ssize_t number = 0; number < values->moves.count; number++)
        if (values->moves.piece[number].with_leaf < 0) return PyErr_BadArgument(), NULL;
    values->makers = Py_NewRef(makers);
    values->windows = Py_XNewRef(windows);
    values->is_listed = is_listed;
    Py_RETURN_NONE;
}

static PyMethodDef tape_methods[] = {
    {"shows", (PyCFunction)tape_shows, METH_VARARGS,
     "shows(template, pieces)\n--\n\nShow the arrays of calls that are known by their form."},
    {"expects", (PyCFunction)tape_expects, METH_VARARGS,
     "expects(pieces, moves, makers, is_listed, windows=None)\n--\n\nMake the result of such calls"
     " like this from now on, if others have shown the `pieces`."},
    {0},
};
static PyMemberDef tape_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Tape, vectorcall), READONLY, NULL},
    {0},
};
static PyType_Slot tape_slots[] = {
    {Py_tp_new, tape_new},
    {Py_tp_dealloc, tape_dealloc},
    {Py_tp_traverse, tape_traverse},
    {Py_tp_clear, tape_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, tape_members},
    {Py_tp_methods, tape_methods},
    {Py_tp_doc, "The steps of one phase in one area of a lane: see aiodist.prepared.tapes."},
    {0, NULL},
};
static PyType_Spec tape_spec = {
    .name = "aiodist._core.Tape",
    .basicsize = sizeof(Tape),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = tape_slots,
};

// ---- the caller ---------------------------------------------------------------------------------

// The slots of a Work, in the order of `WORK_SLOTS`.
enum { OP, TAG, SEQ, NBYTES, SOURCE, WORK_TRACE, RECORD, ON_CANCEL, STARTED, ENDED, UNSEEN, SLOTS };
static const char *const work_slots[SLOTS] = {"op",     "tag",        "seq",      "nbytes",
                                              "source", "trace",      "record",   "_on_cancel",
                                              "_started", "_ended",   "_unseen"};

#define KINDS 32       // so many kinds of calls are known by their form
#define NODES 64       // the most arguments, arrays, numbers, lists and dicts of one form
#define DIMENSIONS 4   // the most dimensions of an array
#define LOOP_DUE 0.0007  // as in aiodist.transports.polling

// The parts of a form: see aiodist.collectives.forms. A list or dict comes before what it contains.
enum { AN_ARRAY, A_TENSOR, A_NUMBER, A_WORD, A_TREE, PARTS };
typedef struct {
    int kind, is_place;
    PyObject *what, *keys;  // a dtype, type or object; the keys of a dict
    int count;              // dimensions, or items
    Py_ssize_t dimensions[DIMENSIONS], nbytes;
    Tensor like;            // has the dtype of tensors
} Node;

// A kind of call. `args` arguments have these nodes.
typedef struct {
    PyObject *op, *recipe, *template, *finish;
    int args, result, is_apart;  // the argument that is the result; whether no arrays share memory
    int nodes;
    Node *node;
} Kind;

// What starts calls: it makes their Works, and knows their kinds.
#define STARTER                                                                                    \
    PyObject_HEAD                                                                                  \
    PyObject *records, *progress, *loop, *time, *where, *nothing;                                  \
    PyObject *work, *ordinary, *unseen; /* types of a Work that is done and of others; `Unseen` */ \
    PyObject **names, *ndarray;                                                                    \
    PyObject *tensor; /* torch's type of tensors, after the first one was seen */                  \
    const Exchange *exchange;                                                                      \
    Py_ssize_t slots[SLOTS];                                                                       \
    Kind kinds[KINDS]; /* the most recent first */                                                 \
    int known;                                                                                     \
    unsigned changes /* how often the kinds were changed */

typedef struct {
    STARTER;
} Starter;

typedef struct {
    STARTER;
    PyObject *empty, *unset;  // see `is_quiet`
    PyObject *next, *idle, *passed, *said, *heap;
    PyObject *run, *start, *all_reduce, *lay, *unfinished, *broke;
    long long first, many;
    PyTypeObject *tape;
} Caller;

// One call. `x` and `flat` are what `Recipe.lay_out` returns. If they are NULL, the call is known by
// its form, and the Python code has not laid it out.
typedef struct {
    PyObject *recipe, *x, *flat, *seconds, *tag;
    PyObject *const *args;
    const Kind *kind;
    Leaves *leaves;
} Call;

// Whether an attribute is None or false. -1: an error.
static int is_unset(PyObject *owner, PyObject *name) {
    PyObject *found = PyObject_GetAttr(owner, name);
    if (!found) return -1;
    const int set = found != Py_None && PyObject_IsTrue(found);
    Py_DECREF(found);
    return set < 0 ? -1 : !set;
}

// The number that a dict has for a tag. 0: it has none. -1: an error.
static long long number_in(PyObject *numbers, PyObject *tag) {
    PyObject *found = PyDict_GetItemWithError(numbers, tag);
    return found ? PyLong_AsLongLong(found) : PyErr_Occurred() ? -1 : 0;
}

static void set_slot(Starter *starter, PyObject *work, int slot, PyObject *value) {
    PyObject **at = (PyObject **)((char *)work + starter->slots[slot]);
    Py_XSETREF(*at, Py_NewRef(value));
}

// 1: the next call may run at once, because all containers in `empty` are empty, and all attributes
// in `unset`, which has pairs of (owner, name), are unset. 0: it may not. -1: an error.
static int is_quiet(Caller *caller) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(caller->empty); at++) {
        const Py_ssize_t size = PyObject_Size(PyTuple_GET_ITEM(caller->empty, at));
        if (size) return size < 0 ? -1 : 0;
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(caller->unset); at++) {
        PyObject *pair = PyTuple_GET_ITEM(caller->unset, at);
        const int unset = is_unset(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
        if (unset <= 0) return unset;
    }
    return 1;
}

// Make an ordinary Work of one that is not done yet. The Python way has it watched.
static int make_ordinary(Starter *starter, PyObject *work) {
    return PyObject_SetAttr(work, starter->names[CLASS], starter->ordinary);
}

// Drop a Work that the program never gets, so that it is not warned of.
static void drop_work(Starter *starter, PyObject **work) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (make_ordinary(starter, *work) < 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
    Py_CLEAR(*work);
}

static PyObject *make_work(Starter *starter, PyObject *op, PyObject *tag, PyObject *seq,
                           PyObject *nbytes) {
    PyObject *started = PyObject_CallNoArgs(starter->time);
    if (!started) return NULL;
    // A call of the type would make this tuple and this dict anew each time.
    PyTypeObject *type = (PyTypeObject *)starter->work;
    PyObject *work = type->tp_new(type, starter->nothing, starter->loop);
    if (work && type->tp_init(work, starter->nothing, starter->loop) < 0) Py_CLEAR(work);
    if (work) {
        set_slot(starter, work, OP, op);
        set_slot(starter, work, TAG, tag);
        set_slot(starter, work, SEQ, seq);
        set_slot(starter, work, NBYTES, nbytes);
        for (int slot = SOURCE; slot <= ON_CANCEL; slot++) set_slot(starter, work, slot, Py_None);
        set_slot(starter, work, STARTED, started);
        set_slot(starter, work, ENDED, Py_None);
        set_slot(starter, work, UNSEEN, starter->unseen);
    }
    Py_DECREF(started);
    return work;
}

// `Lane.try_enter` without a wait.
static int enter(Tape *tape, PyObject *said, long long seq) {
    Row *row = row_of(tape);
    uint64_t *own = own_words(tape);
    const int parity = (int)(seq & 1);
    if (own[CALL + parity] != tape->digest) {
        PyObject *digest = PyLong_FromUnsignedLongLong(tape->digest);
        if (!digest || PyList_SetItem(said, parity, digest) < 0) return -1;
        const Py_ssize_t length = PyBytes_GET_SIZE(tape->call);
        const Py_ssize_t shown = length < TEXT_ROOM ? length : TEXT_ROOM;
        uint64_t *text = own + TEXT + TEXT * parity;
        text[0] = (uint64_t)shown;
        memcpy(text + 1, PyBytes_AS_STRING(tape->call), shown);
        show(own + CALL + parity, tape->digest);
    }
    row->seq = seq;
    row->base = (seq + 1) * AN_OPERATION;
    row->digest = tape->digest;
    row->publishes = 0;
    row->entered = 1;
    row->phase = 0;
    return 0;
}

// Record a call that is done, and complete its Work: at once, or after the loop's next turn if that is
// due and it may wait. 1: after that turn. -1: an error.
static int end_work(Starter *starter, PyObject *work, PyObject *call, PyObject *peer, PyObject *result,
                    int at_once) {
    PyObject *entry = NULL, *add = NULL, *done = NULL, *had[SLOTS];
    int failed = -1;
    for (int slot = 0; slot < SLOTS; slot++)
        had[slot] = *(PyObject **)((char *)work + starter->slots[slot]);
    PyObject *ended = PyObject_CallNoArgs(starter->time);
    if (!ended) return -1;
    entry = PyTuple_Pack(9, starter->where, had[OP], had[TAG], had[SEQ], call, peer, had[NBYTES],
                         had[STARTED], ended);
    add = entry ? PyObject_GetAttr(starter->records, starter->names[ADD]) : NULL;
    done = add ? PyObject_CallOneArg(add, entry) : NULL;
    if (!done) goto end;
    Py_CLEAR(done);
    // If the loop is due for a turn, or was never asked for one, `Progress.finish` handles that.
    const double left = ((Pace *)starter->progress)->due - now();
    if (!at_once && (left <= 0 || left > LOOP_DUE)) {
        PyObject *args[] = {starter->progress, work, result, ended};
        if (make_ordinary(starter, work) < 0) goto end;
        done = PyObject_VectorcallMethod(starter->names[FINISH], args, 4, NULL);
    } else {
        set_slot(starter, work, ENDED, ended);
        done = PyObject_CallMethodOneArg(work, starter->names[SET_RESULT], result);
    }
    failed = done ? done == Py_True : -1;
end:
    Py_XDECREF(done);
    Py_XDECREF(add);
    Py_XDECREF(entry);
    Py_DECREF(ended);
    return failed;
}

// Count a call as done: `Express._done`.
static int finish_call(Caller *caller, Tape *tape, PyObject *work, const Call *call,
                       PyObject *next) {
    PyObject *const tag = call->tag;
    if (!tape->posters) {
        Row *row = row_of(tape);
        row->entered = row->agreed = 0;
        row->phase = -1;
    }
    // The call counts before Python code runs, because that could make the next one.
    if (PyDict_SetItem(caller->next, tag, next) < 0) return -1;
    PyObject *const finish = call->flat ? tape->finish : call->kind->finish;
    PyObject *x = call->x, *result;
    if (!x && call->leaves->result) x = call->leaves->result;
    if (!x) x = call->kind->result < 0 ? Py_None : call->args[call->kind->result];
    result = finish == Py_None ? Py_NewRef(x) : PyObject_CallOneArg(finish, x);
    int failed = -1;
    if (!result) goto end;
    if (tag != Py_None) {
        const int is_idle = PyDict_Contains(caller->idle, tag);
        if (is_idle < 0) goto end;
        if (!is_idle || PyDict_GET_SIZE(caller->idle) > caller->many) {
            PyObject *done = PyObject_CallOneArg(caller->passed, tag);
            if (!done) goto end;
            Py_DECREF(done);
        }
    }
    failed = end_work((Starter *)caller, work, tape->call, Py_None, result, 0) < 0 ? -1 : 0;
end:
    Py_XDECREF(result);
    return failed;
}

// Hand a call that did not end at once to the Python code that goes on with it.
static int hand_over(Caller *caller, const Call *call, PyObject *work, int area, int done) {
    PyObject *found = NULL;
    if (done == FAILED) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        if (make_ordinary((Starter *)caller, work) < 0) PyErr_Clear();
        if (trace) PyException_SetTraceback(error, trace);
        if (PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
            found = PyObject_CallFunctionObjArgs(caller->broke, work, call->recipe, error, call->seconds,
                                                 NULL);
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        } else {
            PyErr_Restore(type, error, trace);
        }
    } else {
        if (make_ordinary((Starter *)caller, work) < 0) return -1;
        found = PyObject_CallFunction(caller->unfinished, "OOOOiiO", work, call->recipe, call->x,
                                      call->flat, area, done, call->seconds);
    }
    Py_XDECREF(found);
    return found ? 0 : -1;
}

// Whether the lane allows its next operation to enter, and to write to the area of the tape.
static int may_enter(Caller *caller, Tape *tape, long long number) {
    if (own_words(tape)[PLACE + (number & 1)]) return 0;
    PyObject *free = PyList_GetItem(tape->free, tape->area);
    if (!free) return 0;
    const long long before = number > caller->first ? number * AN_OPERATION : 0;
    const long long over = PyLong_AsLongLong(free), needed = over > before ? over : before;
    return row_of(tape)->known >= needed || reached(tape, needed);
}

// Lay a call out that is known by its form, because the Python code goes on with it. -1: an error.
static int lay_out(Caller *caller, Call *call) {
    if (call->flat) return 0;
    // Keep the error of the tape, because laying out could overwrite it.
    PyObject *type, *error, *trace, *pair = NULL, *args = PyTuple_New(call->kind->args);
    PyErr_Fetch(&type, &error, &trace);
    for (int at = 0; args && at < call->kind->args; at++)
        PyTuple_SET_ITEM(args, at, Py_NewRef(call->args[at]));
    if (args) pair = PyObject_CallFunctionObjArgs(caller->lay, call->recipe, args, NULL);
    Py_XDECREF(args);
    if (pair == Py_None) PyErr_SetString(PyExc_RuntimeError, "the call was changed by another one");
    const int is_laid = pair && pair != Py_None && PyArg_ParseTuple(pair, "OO", &call->x, &call->flat);
    if (is_laid) {
        Py_INCREF(call->x);
        Py_INCREF(call->flat);
        PyErr_Restore(type, error, trace);
    } else {
        call->x = call->flat = NULL;
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(pair);
    return is_laid ? 0 : -1;
}

// The arrays of the user, if the tape is made for such a call. 0: it is not.
static int find_arrays(const Tape *tape, const Call *call, char **user) {
    const Leaves *leaves = call->leaves;
    if (!leaves) return memories_of((Tape *)tape, call->flat, user);
    if (tape->values)
        return tape->values->template == call->kind->template && have_room(&tape->values->shows, leaves) &&
               (!tape->posters || tape->values->makers);
    if (!tape->kernel || call->kind->template != Py_None || leaves->count != 1 + tape->both) return 0;
    for (int which = 0; which < USER; which++) {
        const Leaf *leaf = &leaves->leaf[tape->both ? which : 0];
        if (leaf->nbytes != tape->lengths[which] * tape->kernel->itemsize) return 0;
        user[which] = leaf->data;
    }
    return 1;
}

// Start a call. Returns NULL without an error if nothing has happened.
static PyObject *start(Caller *caller, Call *call) {
    PyObject *tapes = PyObject_GetAttr(call->recipe, caller->names[TAPES]);
    if (!tapes) return NULL;
    PyObject *work = NULL, *seq = NULL, *next = NULL, *heads = NULL;
    if (!PyTuple_Check(tapes) || PyTuple_GET_SIZE(tapes) != 2) goto end;
    const long long number = number_in(caller->next, call->tag);
    if (number < caller->first) goto end;
    Tape *tape = (Tape *)PyTuple_GET_ITEM(tapes, number & 1);
    if (!Py_IS_TYPE(tape, caller->tape)) goto end;
    seq = PyLong_FromLongLong(number);
    next = PyLong_FromLongLong(number + 1);
    // This may run any Python code, even another call of this group. So all else is looked at after it.
    const unsigned taught = tape->taught;
    const int posts = tape->posters && (tape->kernel || (call->leaves && tape->values && tape->values->makers));
    if (posts && !(heads = PyObject_GetItem(tape->heads, call->tag))) goto end;
    if (seq && next) work = make_work((Starter *)caller, tape->op, call->tag, seq, tape->nbytes);
    if (!work) goto end;
    char *user[USER];
    if (number_in(caller->next, call->tag) != number || tape->taught != taught || is_quiet(caller) <= 0 ||
        (tape->may_be_in_place && is_unset(caller->heap, caller->names[SHOWS_ANY]) <= 0) ||
        !find_arrays(tape, call, user) ||
        (tape->posters ? is_given_up(tape) : !may_enter(caller, tape, number))) {
        drop_work((Starter *)caller, &work);
        goto end;
    }
    int done, failed = 0;
    if (!tape->posters)
        done = enter(tape, caller->said, number) < 0
                   ? NO_ROOM
                   : run_tape(tape, call->flat, user, call->leaves, 0);
    else if (posts)
        done = run_posts(tape, heads, taught, number, user, call->leaves);
    else
        done = run_function(tape, call->tag, seq, call->x, call->flat, 0);
    if (done != ALL_DONE && done != NO_ROOM && lay_out(caller, call) < 0)
        done = FAILED;
    else if (done == UNKNOWN)
        done = tape->posters ? run_function(tape, call->tag, seq, call->x, call->flat, 1)
                             : run_tape(tape, call->flat, user, NULL, tape->steps - 1);
    if (done == NO_ROOM)
        drop_work((Starter *)caller, &work);
    else if (done == ALL_DONE)
        failed = finish_call(caller, tape, work, call, next);
    else
        failed = hand_over(caller, call, work, tape->area, done);
    if (failed) drop_work((Starter *)caller, &work);
end:
    Py_XDECREF(heads);
    Py_XDECREF(next);
    Py_XDECREF(seq);
    Py_DECREF(tapes);
    return work;
}

// Return the number that a method returns. -1: an error, or no such method.
static long long number_of(PyObject *owner, PyObject *name) {
    PyObject *found = PyObject_CallMethodNoArgs(owner, name);
    const long long number = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

// The address of a tensor's elements if they are contiguous, on this host, and in memory that its
// storage has already: see `aiodist.buffers.tensors.flat`. NULL: the Python code decides, or an error.
static char *elements_of(PyObject **names, PyObject *x, const Tensor *tensor, Py_ssize_t nbytes) {
    char *data = NULL;
    int64_t elements = 1;
    for (int at = tensor->nd; at--; elements *= tensor->dimensions[at])
        if (tensor->strides && tensor->dimensions[at] > 1 && tensor->strides[at] != elements) return NULL;
    PyObject *is_negated = PyObject_CallMethodNoArgs(x, names[IS_NEG]);
    Py_XDECREF(is_negated);
    if (is_negated != Py_False) goto end;
    PyObject *storage = PyObject_CallMethodNoArgs(x, names[STORAGE]);
    if (!storage) goto end;
    const uint64_t start = (uint64_t)number_of(storage, names[DATA_PTR]);
    const uint64_t held = PyErr_Occurred() ? 0 : (uint64_t)number_of(storage, names[NBYTES_OF]);
    Py_DECREF(storage);
    char *first = (char *)tensor->data + tensor->offset;
    const uint64_t before = (uint64_t)first - start;
    if (!PyErr_Occurred() && start && first && before <= held && (uint64_t)nbytes <= held - before)
        data = first;
end:
    forget_error();
    return data;
}

// ---- forms --------------------------------------------------------------------------------------

static Leaf *add_leaf(Leaves *leaves, const Node *node, PyObject *x, char *data) {
    if (!data || leaves->count == LEAVES) return NULL;
    Leaf *leaf = &leaves->leaf[leaves->count++];
    leaf->owner = Py_NewRef(x);
    leaf->data = data;
    leaf->nbytes = node->nbytes;
    leaf->is_place = node->is_place;
    return leaf;
}

// Add the bytes of a number, as aiodist.collectives.numbers packs them. 0: it needs more bytes.
static int add_number(Leaves *leaves, const Node *node, PyObject *x) {
    Leaf *leaf = add_leaf(leaves, node, x, (char *)leaves);
    if (!leaf) return 0;
    leaf->data = leaf->number;
    if (PyFloat_CheckExact(x)) return !PyFloat_Pack8(PyFloat_AS_DOUBLE(x), leaf->number, 0);
    if (PyBool_Check(x)) {
        leaf->number[0] = x == Py_True ? (char)0xc3 : (char)0xc2;
        return 1;
    }
    int beyond;
    const uint64_t number = (uint64_t)PyLong_AsLongLongAndOverflow(x, &beyond);
    for (int at = 0; at < 8; at++) leaf->number[at] = (char)(number >> (56 - 8 * at));
    return !beyond;
}

// Read what a tensor is. 0: it is none that others can read, such as a sparse one, or an error.
static int read_tensor(const Starter *starter, PyObject *x, Tensor *into) {
    if (!starter->exchange->read(x, into)) return 1;
    forget_error();
    return 0;
}

// Whether torch's dtype is that of the node. DLPack has one dtype for all integers of up to 8 bits.
static int has_dtype(const Starter *starter, const Node *node, PyObject *x) {
    if (node->like.dtype.bits > 8) return 1;
    PyObject *dtype = PyObject_GetAttr(x, starter->names[DTYPE]);
    if (!dtype) forget_error();
    Py_XDECREF(dtype);
    return dtype == node->what;
}

static int has_shape(const Node *node, int nd, const int64_t *dimensions) {
    if (nd != node->count) return 0;
    for (int at = 0; at < nd; at++)
        if (dimensions[at] != node->dimensions[at]) return 0;
    return 1;
}

static int item_matches(Starter *starter, const Node **next, PyObject *item, Leaves *leaves);

// Whether `x` has the form that begins at `*next`. Its arrays and numbers are added to the leaves. If
// not, the kinds may have changed, or there is an error.
static int matches(Starter *starter, const Node **next, PyObject *x, Leaves *leaves) {
    const Node *node = (*next)++;
    if (node->kind == A_WORD) return x == node->what;
    if (node->kind == AN_ARRAY) {
        const Array *array = (Array *)x;
        return (PyObject *)Py_TYPE(x) == starter->ndarray && array->descr == node->what &&
               (array->flags & PLAIN_ARRAY) == PLAIN_ARRAY &&
               has_shape(node, array->nd, (int64_t *)array->dimensions) &&
               add_leaf(leaves, node, x, array->data);
    }
    if (node->kind == A_TENSOR) {
        // Tensors may run Python code, such as a mode of torch, and that may make us forget the node.
        const Node like = *node;
        const unsigned changes = starter->changes;
        Tensor tensor;
        return (PyObject *)Py_TYPE(x) == starter->tensor && read_tensor(starter, x, &tensor) &&
               tensor.device == ON_CPU && has_shape(&like, tensor.nd, tensor.dimensions) &&
               !memcmp(&tensor.dtype, &like.like.dtype, sizeof tensor.dtype) && has_dtype(starter, &like, x) &&
               add_leaf(leaves, &like, x, elements_of(starter->names, x, &tensor, like.nbytes)) &&
               starter->changes == changes;
    }
    if ((PyObject *)Py_TYPE(x) != node->what) return 0;
    if (node->kind == A_NUMBER) return add_number(leaves, node, x);
    if (node->keys) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        if (PyDict_GET_SIZE(x) != node->count) return 0;
        for (int number = 0; PyDict_Next(x, &at, &key, &value); number++)
            if (number == node->count || key != PyTuple_GET_ITEM(node->keys, number) ||
                !item_matches(starter, next, value, leaves))
                return 0;
        return 1;
    }
    if (PySequence_Fast_GET_SIZE(x) != node->count) return 0;
    for (int number = 0; number < node->count; number++)
        if (number >= PySequence_Fast_GET_SIZE(x) ||
            !item_matches(starter, next, PySequence_Fast_GET_ITEM(x, number), leaves))
            return 0;
    return 1;
}

// The same for an item of a list or dict, which Python code may take out meanwhile.
static int item_matches(Starter *starter, const Node **next, PyObject *item, Leaves *leaves) {
    Py_INCREF(item);
    const int is_like = matches(starter, next, item, leaves);
    Py_DECREF(item);
    return is_like;
}

// Whether two arrays share memory of which one is a place. Values are copied before any is written,
// so they may share memory with places.
static int share_memory(const Kind *kind, const Leaves *leaves) {
    for (int one = 0; one < leaves->count; one++) {
        const Leaf *a = &leaves->leaf[one];
        if (!a->is_place) continue;
        for (int other = 0; other < leaves->count; other++) {
            const Leaf *b = &leaves->leaf[other];
            const int counts = other < one || !b->is_place;
            if (counts && (kind->is_apart || b->is_place) && a->data < b->data + b->nbytes &&
                b->data < a->data + a->nbytes)
                return 1;
        }
    }
    return 0;
}

// Start a call of `op` that is known by its form. Returns NULL without an error if none is.
static PyObject *start_known(Caller *caller, PyObject *op, PyObject *const *args, Py_ssize_t count,
                             PyObject *seconds, PyObject *tag) {
    Leaves leaves;
    leaves.count = 0;
    leaves.result = NULL;
    for (int at = 0; at < caller->known; at++) {
        const Kind *kind = &caller->kinds[at];
        if (kind->op != op || kind->args != count) continue;
        const Node *next = kind->node;
        int is_like = 1;
        for (int arg = 0; is_like && arg < kind->args; arg++)
            is_like = matches((Starter *)caller, &next, args[arg], &leaves);
        if (!is_like || share_memory(kind, &leaves)) {
            drop_leaves(&leaves);
            forget_error();
            if (PyErr_Occurred()) return NULL;
            continue;
        }
        // The Python code may make the caller forget this kind meanwhile.
        Kind known = *kind;
        Py_INCREF(known.recipe);
        Py_INCREF(known.template);
        Py_INCREF(known.finish);
        Call call = {known.recipe, NULL, NULL, seconds, tag, args, &known, &leaves};
        PyObject *work = start(caller, &call);
        Py_XDECREF(call.x);
        Py_XDECREF(call.flat);
        Py_DECREF(known.recipe);
        Py_DECREF(known.template);
        Py_DECREF(known.finish);
        drop_leaves(&leaves);
        return work;
    }
    return NULL;
}

// all_reduce(x, op, seconds, tag=None)
static PyObject *caller_all_reduce(Caller *caller, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs == 3 || nargs == 4) {
        PyObject *tag = nargs == 4 ? args[3] : Py_None;
        if (PyFloat_CheckExact(args[0]) || PyLong_CheckExact(args[0])) Py_RETURN_NONE;  // no array
        PyObject *work = start_known(caller, caller->names[ALL_REDUCE], args, 2, args[2], tag);
        if (work || PyErr_Occurred()) return work;
    }
    return PyObject_Vectorcall(caller->all_reduce, args, nargs, NULL);
}

// start(op, make, args, seconds, tag=None)
static PyObject *caller_start(Caller *caller, PyObject *const *args, Py_ssize_t nargs) {
    if ((nargs == 4 || nargs == 5) && PyTuple_Check(args[2])) {
        PyObject *tag = nargs == 5 ? args[4] : Py_None;
        PyObject *const *each = ((PyTupleObject *)args[2])->ob_item;
        PyObject *work = start_known(caller, args[0], each, PyTuple_GET_SIZE(args[2]), args[3], tag);
        if (work || PyErr_Occurred()) return work;
    }
    return PyObject_Vectorcall(caller->start, args, nargs, NULL);
}

// run(recipe, x, flat, seconds, tag=None)
static PyObject *caller_run(Caller *caller, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs == 4 || nargs == 5) {
        Call call = {args[0], args[1], args[2], args[3], nargs == 5 ? args[4] : Py_None, NULL, NULL, NULL};
        PyObject *work = start(caller, &call);
        if (work || PyErr_Occurred()) return work;
    }
    return PyObject_Vectorcall(caller->run, args, nargs, NULL);
}

static void drop_kind(Kind *kind) {
    Py_CLEAR(kind->op);
    Py_CLEAR(kind->recipe);
    Py_CLEAR(kind->template);
    Py_CLEAR(kind->finish);
    for (int at = 0; at < kind->nodes; at++) {
        Py_CLEAR(kind->node[at].what);
        Py_CLEAR(kind->node[at].keys);
    }
    PyMem_Free(kind->node);
    kind->node = NULL;
    kind->nodes = 0;
}

// Find out how tensors are read, from the first one. 0: not possible here. -1: an error.
static int know_tensors(Starter *starter, PyObject *type) {
    if (starter->tensor) return type == starter->tensor;
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!exchange) return -1;
    if (exchange->major != 1 || !exchange->read) return 0;
    starter->exchange = exchange;
    starter->tensor = Py_NewRef(type);
    return 1;
}

// Read the description of a part: (kind, what, shape or items, is_place). 1: it can be recognised here.
// 0: it cannot. -1: an error.
static int parse_node(Starter *starter, PyObject *given, Kind *kind) {
    PyObject *what, *more, *items = NULL;
    int part, is_place;
    if (!PyArg_ParseTuple(given, "iOOp", &part, &what, &more, &is_place)) return -1;
    if (part < 0 || part >= PARTS || kind->nodes == NODES) return 0;
    Node *node = &kind->node[kind->nodes++];
    node->kind = part;
    node->is_place = is_place;
    node->what = Py_NewRef(what);
    if (part == A_NUMBER) {
        node->nbytes = what == (PyObject *)&PyBool_Type ? 1 : 8;
        return what == (PyObject *)&PyFloat_Type || what == (PyObject *)&PyLong_Type ||
               what == (PyObject *)&PyBool_Type;
    }
    if (part == A_TREE) {
        PyObject *keys;
        if (!PyArg_ParseTuple(more, "OO!", &keys, &PyList_Type, &items)) return -1;
        if (PyTuple_Check(keys)) node->keys = Py_NewRef(keys);
        node->count = (int)PyList_GET_SIZE(items);
        const int is_dict = what == (PyObject *)&PyDict_Type;
        const int is_known = is_dict || what == (PyObject *)&PyList_Type || what == (PyObject *)&PyTuple_Type;
        if (!is_known || is_dict != (node->keys != NULL)) return 0;
        if (node->keys && PyTuple_GET_SIZE(keys) != node->count) return 0;
        for (int number = 0; number < node->count; number++) {
            const int found = parse_node(starter, PyList_GET_ITEM(items, number), kind);
            if (found <= 0) return found;
        }
    } else if (part == A_TENSOR) {
        const int known = know_tensors(starter, (PyObject *)Py_TYPE(what));
        if (known <= 0) return known;
        if (!read_tensor(starter, what, &node->like)) return PyErr_Occurred() ? -1 : 0;
        if (node->like.nd > DIMENSIONS || node->like.dtype.code == COMPLEX) return 0;
        if (node->like.dtype.bits % 8 || node->like.dtype.lanes != 1) return 0;
        node->count = node->like.nd;
        node->nbytes = node->like.dtype.bits / 8;
        for (int at = 0; at < node->count; at++)
            node->nbytes *= node->dimensions[at] = (Py_ssize_t)node->like.dimensions[at];
        PyObject *dtype = PyObject_GetAttr(what, starter->names[DTYPE]);
        if (!dtype) return -1;
        Py_SETREF(node->what, dtype);  // the tensor itself may go
    } else if (part == AN_ARRAY) {
        const Array *like = (Array *)more;
        if ((PyObject *)Py_TYPE(more) != starter->ndarray || like->nd > DIMENSIONS) return 0;
        PyObject *itemsize = PyObject_GetAttrString(what, "itemsize");
        node->nbytes = itemsize ? PyLong_AsSsize_t(itemsize) : -1;
        Py_XDECREF(itemsize);
        if (PyErr_Occurred()) return -1;
        node->count = like->nd;
        for (int at = 0; at < node->count; at++)
            node->nbytes *= node->dimensions[at] = like->dimensions[at];
    }
    return 1;
}

// know(op, recipe, args, result, is_apart, template, finish)
static PyObject *starter_know(Starter *starter, PyObject *given) {
    Kind kind = {0};
    PyObject *args;
    if (!PyArg_ParseTuple(given, "OOO!ipOO", &kind.op, &kind.recipe, &PyList_Type, &args, &kind.result,
                          &kind.is_apart, &kind.template, &kind.finish))
        return NULL;
    Py_INCREF(kind.op);
    Py_INCREF(kind.recipe);
    Py_INCREF(kind.template);
    Py_INCREF(kind.finish);
    kind.node = PyMem_Calloc(NODES, sizeof(Node));
    kind.args = (int)PyList_GET_SIZE(args);
    int found = kind.node && kind.result < kind.args ? 1 : -1;
    if (found < 0 && !PyErr_Occurred()) PyErr_BadArgument();
    for (int at = 0; found > 0 && at < kind.args; at++)
        found = parse_node(starter, PyList_GET_ITEM(args, at), &kind);
    Node *fitting = found > 0 ? PyMem_Realloc(kind.node, (kind.nodes + 1) * sizeof(Node)) : NULL;
    if (!fitting) {
        drop_kind(&kind);
        return found < 0 ? NULL : PyBool_FromLong(0);
    }
    kind.node = fitting;
    starter->changes++;
    for (int at = 0; at < starter->known; at++) {
        if (starter->kinds[at].recipe != kind.recipe) continue;
        drop_kind(&starter->kinds[at]);
        starter->known--;
        memmove(starter->kinds + at, starter->kinds + at + 1, (starter->known - at) * sizeof(Kind));
        break;
    }
    if (starter->known == KINDS) drop_kind(&starter->kinds[--starter->known]);
    memmove(starter->kinds + 1, starter->kinds, starter->known * sizeof(Kind));
    starter->kinds[0] = kind;
    starter->known++;
    Py_RETURN_TRUE;
}

static PyObject *starter_forget(Starter *starter, PyObject *nothing) {
    starter->changes++;
    while (starter->known) drop_kind(&starter->kinds[--starter->known]);
    Py_RETURN_NONE;
}

// Objects that are given by keywords when a starter is made.
typedef struct {
    const char *name;
    size_t at;
} Ref;

#define REF(Type, name) {#name, offsetof(Type, name)}
static const Ref starter_refs[] = {
    REF(Starter, records), REF(Starter, progress), REF(Starter, loop),     REF(Starter, time),
    REF(Starter, where),   REF(Starter, nothing),  REF(Starter, work),     REF(Starter, ordinary),
    REF(Starter, unseen),  {0}};
static const Ref caller_refs[] = {
    REF(Caller, empty), REF(Caller, unset), REF(Caller, next),       REF(Caller, idle),
    REF(Caller, said),  REF(Caller, passed), REF(Caller, run),       REF(Caller, start),
    REF(Caller, lay),   REF(Caller, broke), REF(Caller, unfinished), REF(Caller, all_reduce),
    REF(Caller, heap),  {0}};

static PyObject **ref_of(void *of, const Ref *ref) { return (PyObject **)((char *)of + ref->at); }

static int visit_refs(void *of, const Ref *refs, visitproc visit, void *arg) {
    for (; refs->name; refs++) Py_VISIT(*ref_of(of, refs));
    return 0;
}

static void clear_refs(void *of, const Ref *refs) {
    for (; refs->name; refs++) Py_CLEAR(*ref_of(of, refs));
}

static int take_refs(void *of, const Ref *refs, PyObject *keywords) {
    for (; refs->name; refs++) {
        PyObject *given = keywords ? PyDict_GetItemString(keywords, refs->name) : NULL;
        if (!given) {
            PyErr_Format(PyExc_TypeError, "a starter needs %s", refs->name);
            return -1;
        }
        *ref_of(of, refs) = Py_NewRef(given);
    }
    return 0;
}

// Where an object of this type keeps an attribute. -1: it is no slot.
static Py_ssize_t slot_of(PyObject *type, const char *name) {
    PyObject *found = PyObject_GetAttrString(type, name);
    if (!found) return -1;
    const int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type) &&
                        ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX;
    const Py_ssize_t at = is_slot ? ((PyMemberDescrObject *)found)->d_member->offset : -1;
    Py_DECREF(found);
    if (!is_slot) PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    return at;
}

static int visit_starter(Starter *starter, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(starter));
    for (int at = 0; at < starter->known; at++) {
        Py_VISIT(starter->kinds[at].recipe);
        Py_VISIT(starter->kinds[at].finish);
    }
    return visit_refs(starter, starter_refs, visit, arg);
}

// Make a starter of a type with these references.
static Starter *make_starter(PyTypeObject *type, const Ref *refs, PyObject *args, PyObject *keywords) {
    State *state = state_of(type);
    if (!state) return NULL;
    Starter *starter = (Starter *)type->tp_alloc(type, 0);
    if (!starter) return NULL;
    starter->names = state->names;
    starter->ndarray = Py_NewRef(state->ndarray);
    if (take_refs(starter, starter_refs, keywords) < 0 || take_refs(starter, refs, keywords) < 0)
        goto failed;
    if (PyTuple_GET_SIZE(args) || !PyType_Check(starter->work) || !PyDict_Check(starter->loop) ||
        !PyTuple_Check(starter->nothing) || !PyObject_TypeCheck(starter->progress, state->pace)) {
        PyErr_SetString(PyExc_TypeError, "a starter is made of other things");
        goto failed;
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if ((starter->slots[slot] = slot_of(starter->work, work_slots[slot])) < 0) goto failed;
    return starter;
failed:
    Py_DECREF(starter);
    return NULL;
}

static void drop_starter(Starter *starter, const Ref *refs) {
    PyTypeObject *type = Py_TYPE(starter);
    starter_forget(starter, NULL);
    clear_refs(starter, starter_refs);
    clear_refs(starter, refs);
    Py_CLEAR(starter->ndarray);
    Py_CLEAR(starter->tensor);
    type->tp_free(starter);
    Py_DECREF(type);
}

static int caller_traverse(Caller *caller, visitproc visit, void *arg) {
    const int found = visit_refs(caller, caller_refs, visit, arg);
    return found ? found : visit_starter((Starter *)caller, visit, arg);
}

static int caller_clear(Caller *caller) {
    Py_CLEAR(caller->run);
    Py_CLEAR(caller->start);
    Py_CLEAR(caller->all_reduce);
    Py_CLEAR(caller->lay);
    Py_CLEAR(caller->unfinished);
    Py_CLEAR(caller->broke);
    return 0;
}

static void caller_dealloc(Caller *caller) {
    PyObject_GC_UnTrack(caller);
    Py_CLEAR(caller->tape);
    drop_starter((Starter *)caller, caller_refs);
}

// Get a number that is given by a keyword. -1: there is none.
static long long number_from(PyObject *keywords, const char *name) {
    PyObject *given = keywords ? PyDict_GetItemString(keywords, name) : NULL;
    if (!given) return PyErr_Format(PyExc_TypeError, "a starter needs %s", name), -1;
    return PyLong_AsLongLong(given);
}

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Caller *caller = (Caller *)make_starter(type, caller_refs, args, keywords);
    if (!caller) return NULL;
    caller->tape = (PyTypeObject *)Py_NewRef(state_of(type)->tape);
    caller->first = number_from(keywords, "first");
    if (!PyErr_Occurred()) caller->many = number_from(keywords, "many");
    if (PyErr_Occurred()) goto failed;
    int is_sound = PyDict_Check(caller->next) && PyDict_Check(caller->idle) &&
                   PyList_Check(caller->said) && PyList_GET_SIZE(caller->said) == 2 &&
                   PyTuple_Check(caller->empty) && PyTuple_Check(caller->unset);
    for (Py_ssize_t at = 0; is_sound && at < PyTuple_GET_SIZE(caller->unset); at++) {
        PyObject *pair = PyTuple_GET_ITEM(caller->unset, at);
        is_sound = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
    }
    if (is_sound) return (PyObject *)caller;
    PyErr_SetString(PyExc_TypeError, "a caller is made of other things");
failed:
    Py_DECREF(caller);
    return NULL;
}

static PyMethodDef caller_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))caller_all_reduce, METH_FASTCALL,
     "all_reduce(x, op, seconds, tag=None)\n--\n\nReduce `x` in place: see `Express.all_reduce`."},
    {"run", (PyCFunction)(void (*)(void))caller_run, METH_FASTCALL,
     "run(recipe, x, flat, seconds, tag=None)\n--\n\nDo `recipe` with `x`: see `Express._run`."},
    {"start", (PyCFunction)(void (*)(void))caller_start, METH_FASTCALL,
     "start(op, make, args, seconds, tag=None)\n--\n\nStart any other collective: see `Express.start`."},
    {"know", (PyCFunction)starter_know, METH_VARARGS,
     "know(op, recipe, args, result, is_apart, template, finish)\n--\n\nFind this recipe for such"
     " arguments from now on, and say whether that is possible."},
    {"forget", (PyCFunction)starter_forget, METH_NOARGS,
     "forget()\n--\n\nForget all recipes."},
    {0},
};
static PyType_Slot caller_slots[] = {
    {Py_tp_new, caller_new},
    {Py_tp_dealloc, caller_dealloc},
    {Py_tp_traverse, caller_traverse},
    {Py_tp_clear, caller_clear},
    {Py_tp_methods, caller_methods},
    {Py_tp_doc, "Starts prepared calls on a lane: see aiodist.prepared.lane_express."},
    {0, NULL},
};
static PyType_Spec caller_spec = {
    .name = "aiodist._core.Caller",
    .basicsize = sizeof(Caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = caller_slots,
};

// ---- messages -----------------------------------------------------------------------------------

#define REWIND 65536     // as in aiodist.transports.shm_rings
#define LEAST_IN_ROUND 32768  // as in aiodist.shared_memory.board
#define GIVE_BACK 32768
#define TRIES 4          // as in aiodist.p2p.express
#define CHUNK 32768      // bytes after which a writer shows what it has copied
#define NO_PAYLOAD "\xc6\0\0\0"  // how the prefix of a frame without payload ends, with the 0 of C

enum { DIRECT, TO_COME, POLLING, PEER_ENDED, COMES_AGAIN, FLAGS };
static const char *const flag_names[FLAGS] = {"_direct", "_to_come", "_polling", "_peer_ended", "_again"};

// The way to one rank, and the credit and pushed messages of both directions. `rings` is NULL if it is
// not known.
typedef struct {
    PyObject *link, *used, *wants, *stalled, *waiting, *announced, *held, *owed;
    Rings *rings;
    Debt *sends, *receives;
    Pushes *pushes, *comes;
    Py_ssize_t flags[FLAGS];  // where the link keeps what `FramedLink.is_clear` asks
} Line;

static const Ref line_refs[] = {
    REF(Line, link),    REF(Line, used),      REF(Line, wants),  REF(Line, stalled),
    REF(Line, waiting), REF(Line, announced), REF(Line, held),   REF(Line, owed),
    REF(Line, rings),   REF(Line, sends),     REF(Line, pushes), REF(Line, receives),
    REF(Line, comes),   {0}};

#define IDS 3          // so often the bytes around the data of a pushed message have its id
#define ID 4           // the bytes of an id
#define LEAVE "\3" NO_PAYLOAD  // how a frame ends that gives leave to push, from the end of the id on

// `cost`: what a message costs. `head` and `end`: its bytes before and after the data. `ids`: where the
// id is in both; none if it is not pushed. `nbytes`: the bytes of its payload.
typedef struct {
    PyObject *tag, *entry, *data_size, *text;  // `tag` and `entry` are owned
    const char *head, *end;
    Py_ssize_t before, after, ids[IDS];
    int is_pushed;
    long long cost, nbytes;
} Envelope;

typedef struct {
    STARTER;
    PyObject *neighbours, *frames, *boxes, *receives, *owing, *credits, *flow, *leave;
    PyObject *send, *recv, *packed, *let_all_go, *took, *express, *any_tag, *any_source;
    long long window, most, batch;
    int rank, size, crowded, dozes;
    int served;  // the rank whose message was received last from any rank
    Line *lines;
} Messages;

static const Ref messages_refs[] = {
    REF(Messages, neighbours), REF(Messages, frames), REF(Messages, boxes),
    REF(Messages, receives),   REF(Messages, owing),  REF(Messages, send),
    REF(Messages, recv),       REF(Messages, packed), REF(Messages, let_all_go),
    REF(Messages, took),       REF(Messages, express), REF(Messages, any_tag),
    REF(Messages, any_source), REF(Messages, credits), REF(Messages, flow),
    REF(Messages, leave), {0}};

// The line to a rank whose link has not ended, or NULL.
static Line *line_to(Messages *messages, PyObject *peer) {
    if (!PyLong_CheckExact(peer)) return NULL;
    int beyond;
    const long rank = PyLong_AsLongAndOverflow(peer, &beyond);
    if (beyond || rank < 0 || rank >= messages->size) return NULL;
    Line *line = &messages->lines[rank];
    return line->rings && line->rings->words ? line : NULL;
}

static int is_set(const Line *line, int flag) {
    PyObject *found = *(PyObject **)((char *)line->link + line->flags[flag]);
    return found && found != Py_None && PyObject_IsTrue(found);
}

// `FramedLink.is_clear`.
static int is_clear(const Line *line) {
    return is_set(line, DIRECT) && !is_set(line, TO_COME) && !is_set(line, POLLING) &&
           !is_set(line, PEER_ENDED) && !is_set(line, COMES_AGAIN);
}

// Read what Python has made of a kind of message and a tag: see `aiodist.p2p.message_forms.Wrapping`.
static int read_envelope(PyObject *tag, PyObject *found, Envelope *envelope) {
    if (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 7) return 0;
    PyObject *head = PyTuple_GET_ITEM(found, 0), *end = PyTuple_GET_ITEM(found, 5);
    PyObject *ids = PyTuple_GET_ITEM(found, 6);
    Py_XSETREF(envelope->tag, Py_NewRef(tag));
    Py_XSETREF(envelope->entry, Py_NewRef(found));
    envelope->cost = PyLong_AsLongLong(PyTuple_GET_ITEM(found, 1));
    envelope->nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(found, 2));
    envelope->data_size = PyTuple_GET_ITEM(found, 3);
    envelope->text = PyTuple_GET_ITEM(found, 4);
    if (PyErr_Occurred() || !PyBytes_Check(head) || !PyBytes_Check(end) || !PyTuple_Check(ids)) return 0;
    envelope->head = PyBytes_AS_STRING(head);
    envelope->before = PyBytes_GET_SIZE(head);
    envelope->end = PyBytes_AS_STRING(end);
    envelope->after = PyBytes_GET_SIZE(end);
    envelope->is_pushed = PyTuple_GET_SIZE(ids) == IDS;
    for (int at = 0; envelope->is_pushed && at < IDS; at++) {
        envelope->ids[at] = PyLong_AsSsize_t(PyTuple_GET_ITEM(ids, at));
        // The first two are in the head, and the last one at the end.
        const Py_ssize_t from = at < 2 ? 0 : envelope->before;
        const Py_ssize_t upto = at < 2 ? envelope->before : envelope->before + envelope->after;
        if (envelope->ids[at] < from || envelope->ids[at] > upto - ID) return 0;
    }
    return 1;
}

// The next id of a message that is pushed in this direction. 0: none may be pushed, or the id has more
// than 4 bytes.
static uint32_t next_id(const Pushes *pushes) {
    return pushes->may_push && pushes->sid < UINT32_MAX ? (uint32_t)pushes->sid + 1 : 0;
}

static void write_id(char *into, uint32_t id) {
    for (int at = 0; at < ID; at++) into[at] = (char)(id >> (ID - 1 - at) * 8);
}

// Write what comes before the data, or what comes after it.
static void write_head(char *into, const Envelope *envelope, uint32_t id) {
    memcpy(into, envelope->head, envelope->before);
    for (int at = 0; envelope->is_pushed && at < IDS - 1; at++) write_id(into + envelope->ids[at], id);
}

static void write_end(char *into, const Envelope *envelope, uint32_t id) {
    memcpy(into, envelope->end, envelope->after);
    if (envelope->is_pushed) write_id(into + envelope->ids[IDS - 1] - envelope->before, id);
}

// Whether these bytes are those with a number of 4 bytes in the middle.
static int has_id(const char *found, const char *around, Py_ssize_t nbytes, Py_ssize_t at, uint32_t id) {
    char digits[ID];
    write_id(digits, id);
    return !memcmp(found + at, digits, ID) && !memcmp(found, around, at) &&
           !memcmp(found + at + ID, around + at + ID, nbytes - at - ID);
}

// Whether such a message begins there, and whether it ends there.
static int is_head(const char *found, const Envelope *envelope, uint32_t id) {
    if (!envelope->is_pushed) return !memcmp(found, envelope->head, envelope->before);
    const Py_ssize_t first = envelope->ids[0], second = envelope->ids[1], middle = first + ID;
    return id && second >= middle && has_id(found, envelope->head, middle, first, id) &&
           has_id(found + middle, envelope->head + middle, envelope->before - middle, second - middle, id);
}

static int is_end(const char *found, const Envelope *envelope, uint32_t id) {
    if (!envelope->is_pushed) return 1;
    return has_id(found, envelope->end, envelope->after, envelope->ids[IDS - 1] - envelope->before, id);
}

// The envelope of this kind for a tag. The kind keeps it. 0: the Python code decides.
static int envelope_for(const Kind *kind, PyObject *tag, Envelope *envelope) {
    // True equals 1, but is not a tag.
    if (!PyLong_CheckExact(tag) && !PyUnicode_CheckExact(tag)) return 0;
    PyObject *found = PyDict_GetItemWithError(kind->template, tag);
    if (found) return read_envelope(tag, found, envelope);
    if (PyErr_Occurred()) return 0;
    PyObject *heads = Py_NewRef(kind->template);
    found = PyObject_GetItem(heads, tag);
    const int is_read = found && read_envelope(tag, found, envelope);
    Py_XDECREF(found);
    Py_DECREF(heads);
    return is_read;
}

static void drop_envelope(Envelope *envelope) {
    Py_CLEAR(envelope->tag);
    Py_CLEAR(envelope->entry);
}

static int set_credit(PyObject *credit, PyObject *tag, long long amount) {
    PyObject *number = PyLong_FromLongLong(amount);
    const int failed = number ? PyDict_SetItem(credit, tag, number) : -1;
    Py_XDECREF(number);
    return failed;
}

// A place for so many bytes in the own ring: `Rings.put`. NULL: there is none, or not in one piece.
static char *place_for(Rings *rings, unsigned long long nbytes) {
    const unsigned long long size = rings->own.len - WORDS_OF_RING;
    const unsigned long long upto = rings->written - rings->origin;
    unsigned long long at = upto % size;
    // Data goes all round, because memory that the other core has read just now takes longer to write.
    if (upto >= REWIND && (nbytes < LEAST_IN_ROUND || nbytes > size - at) &&
        look(rings->others + R_READ) == rings->written) {
        rings->origin = rings->written;
        rings->words[R_ORIGIN] = rings->written;  // shown with the next bytes
        at = 0;
    }
    if (nbytes > size - at) return NULL;
    if (nbytes > rings->limit - rings->written) {
        const unsigned long long pending = rings->written - look(rings->others + R_READ);
        if (pending > size) return NULL;  // the Python code raises it
        rings->limit = rings->written + size - pending;
        if (nbytes > size - pending) return NULL;
    }
    return (char *)rings->own.buf + WORDS_OF_RING + at;
}

// Let the peer see more bytes, and wake it if it dozes.
static void show_bytes(Rings *rings, unsigned long long nbytes) {
    rings->written += nbytes;
    show(rings->words + R_WRITTEN, rings->written);
    fence();
    const uint64_t asleep = look(rings->others + R_ASLEEP);
    if (!(asleep & 1) || asleep == rings->rung) return;
    rings->rung = asleep;
    ring(rings->words + R_WRITTEN);
}

// Wake the peer if it sleeps: `Rings._wake_peer`. -1: an error.
static int wake_peer(Rings *rings, PyObject **names) {
    const uint64_t asleep = rings->words ? look(rings->others + R_ASLEEP) : 0;
    if (!asleep || asleep == rings->rung) return 0;
    PyObject *done = PyObject_CallMethodNoArgs((PyObject *)rings, names[WAKE_PEER]);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// How many bytes have come: `Rings.available`. -1: the peer's words make no sense, or the link has ended.
static long long bytes_there(Rings *rings) {
    if (!rings->words) return -1;
    const unsigned long long size = rings->own.len - WORDS_OF_RING;
    rings->seen = look(rings->others + R_WRITTEN);
    const unsigned long long have = rings->seen - rings->read;
    if (have > size) return -1;
    const unsigned long long origin = look(rings->others + R_ORIGIN);
    if (have && origin != rings->peer_origin) {
        if (origin != rings->read) return -1;
        rings->peer_origin = origin;
    }
    return (long long)have;
}

// Whether more than so many bytes have come.
static int has_bytes(void *of, long long count) {
    const Rings *rings = of;
    return rings->words && look(rings->others + R_WRITTEN) - rings->read > (unsigned long long)count;
}

// Note that bytes were read: `Rings.taken`. -1: an error.
static int take_bytes(Rings *rings, unsigned long long nbytes, PyObject **names) {
    rings->read += nbytes;
    if (rings->read - rings->given < GIVE_BACK) return 0;
    rings->given = rings->read;
    show(rings->words + R_READ, rings->read);  // a release, so the bytes are read before
    fence();
    const uint64_t wanted = look(rings->others + R_WANTED);
    if (!wanted || wanted == rings->granted || wanted > rings->read) return 0;
    rings->granted = wanted;
    PyObject *done = PyObject_CallMethodNoArgs((PyObject *)rings, names[BELL]);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// Sleep until more bytes have come: `Rings.doze`.
static void nap_at(Rings *rings, double seconds) {
    rings->given = rings->read;
    show(rings->words + R_READ, rings->read);
    rings->sleeps += 2;
    show(rings->words + R_ASLEEP, rings->sleeps + 1);
    fence();
    sleep_at(rings->others + R_WRITTEN, rings->read, seconds);
    if (rings->words) show(rings->words + R_ASLEEP, 0);
}

// Wait for bytes within the call: `Progress.look`. -1: an error.
static int wait_for_bytes(Messages *messages, Rings *rings, PyObject *src) {
    Pace *pace = (Pace *)messages->progress;
    // A rank of this thread sends nothing while this one waits.
    if (!pace->polls || look(rings->others + R_THREAD) == rings->words[R_THREAD]) return 0;
    const uint64_t at = (uint64_t)here();
    if (rings->words[R_CORE] != at) show(rings->words + R_CORE, at);
    const int near = at && look(rings->others + R_CORE) == at;
    if (near && now() >= pace->parts_at) {
        PyObject *where = Py_BuildValue("((iK)(OK))", messages->rank, (unsigned long long)at, src,
                                        (unsigned long long)at);
        const int done = where ? asks((PyObject *)pace, messages->names[PART], where, NULL) : -1;
        Py_XDECREF(where);
        if (done < 0) return -1;
    }
    const Waiter waiter = {pace, messages->neighbours, messages->names, has_bytes, rings};
    const double due = pace->due + HELD;
    const int found = spin(&waiter, 0, near || messages->crowded, 0, HOGGED, due);
    if (found) return found;
    if (messages->crowded || !messages->dozes) return 0;
    double t = now(), until = t + DOZE * patience(pace->dozed_in_vain);
    if (until > due) until = due;
    for (; t < until && rings->words; t = now()) {
        nap_at(rings, until - t);
        if (has_bytes(rings, 0)) {
            pace->dozed_in_vain = 0;
            return 1;
        }
    }
    pace->dozed_in_vain++;
    return 0;
}

// Take credit for one tag, if that comes next: `Sender.refunded`. 1: it is taken. 0: something else
// comes next, or the Python code has to do more. -1: an error.
static int take_credit(Messages *messages, Line *line, long long have) {
    Rings *rings = line->rings;
    const unsigned long long size = rings->own.len - WORDS_OF_RING, read = rings->read;
    const unsigned long long start = (read - rings->peer_origin) % size;
    const char *next = (char *)rings->peer.buf + WORDS_OF_RING + start;
    if (PyDict_GET_SIZE(line->waiting) || PyDict_GET_SIZE(line->stalled) || PySet_GET_SIZE(line->wants) ||
        PyDict_GET_SIZE(line->used) > TRIES)
        return 0;
    PyObject *tag, *count;
    for (Py_ssize_t at = 0; PyDict_Next(line->used, &at, &tag, &count);) {
        // The frame is made of this, an amount, and no payload.
        PyObject *head = PyDict_GetItemWithError(messages->credits, tag);
        if (!head) {  // it is made, and kept
            PyObject *made = PyErr_Occurred() ? NULL : PyObject_GetItem(messages->credits, tag);
            if (!made) return -1;
            Py_DECREF(made);
            // The Python code may have forgotten the line, or read what came next.
            const int is_next = line->rings == rings && rings->words && rings->read == read;
            return is_next ? take_credit(messages, line, have) : 0;
        }
        if (!PyBytes_Check(head)) return PyErr_BadArgument(), -1;
        const long long length = PyBytes_GET_SIZE(head), whole = length + 4 + (int)sizeof NO_PAYLOAD;
        const int is_it = whole <= have && start + whole <= size &&
                          !memcmp(next, PyBytes_AS_STRING(head), length) &&
                          !memcmp(next + length + 4, NO_PAYLOAD, sizeof NO_PAYLOAD);
        if (!is_it) continue;
        const unsigned char *digits = (const unsigned char *)next + length;
        const long long amount = (long long)digits[0] << 24 | digits[1] << 16 | digits[2] << 8 | digits[3];
        const long long left = PyLong_AsLongLong(count) - amount;
        if (!amount || left < 0) return 0;  // the Python code raises it
        line->sends->total -= amount;
        tag = Py_NewRef(tag);
        const int failed = left ? set_credit(line->used, tag, left) : PyDict_DelItem(line->used, tag);
        Py_DECREF(tag);
        return failed < 0 || take_bytes(rings, whole, messages->names) < 0 ? -1 : 1;
    }
    return 0;
}

// Take leave to push the next message, if that comes next: `Sender.pulled`. As `take_credit`.
static int take_leave(Messages *messages, Line *line, long long have) {
    Rings *rings = line->rings;
    const unsigned long long size = rings->own.len - WORDS_OF_RING;
    const unsigned long long start = (rings->read - rings->peer_origin) % size;
    const char *next = (char *)rings->peer.buf + WORDS_OF_RING + start;
    const long long length = PyBytes_GET_SIZE(messages->leave), whole = length + ID + (int)sizeof LEAVE;
    const long long sid = line->pushes->sid;
    char digits[ID];
    write_id(digits, (uint32_t)sid);
    if (sid > UINT32_MAX || whole > have || start + whole > size ||
        memcmp(next, PyBytes_AS_STRING(messages->leave), length) || memcmp(next + length, digits, ID) ||
        memcmp(next + length + ID, LEAVE, sizeof LEAVE))
        return 0;
    // A message that was announced is pulled by this frame, too.
    PyObject *number = PyLong_FromLongLong(sid);
    const int is_known = number ? PyDict_Contains(line->announced, number) : -1;
    Py_XDECREF(number);
    if (is_known) return is_known < 0 ? -1 : 0;
    line->pushes->may_push = 1;
    return take_bytes(rings, whole, messages->names) < 0 ? -1 : 1;
}

// The next rank from which bytes have come. Ranks take turns. -1: there is none.
static int next_source(const Messages *messages) {
    for (int at = 1; at <= messages->size; at++) {
        const int rank = (messages->served + at) % messages->size;
        Rings *rings = messages->lines[rank].rings;
        if (rings && has_bytes(rings, 0)) return rank;
    }
    return -1;
}

static int has_source(void *of, long long count) { return next_source(of) >= 0; }

// Wait for bytes of any rank within the call. `knows_all`: whether they can come from no other ranks.
// -1: an error.
static int wait_for_any(Messages *messages, int *knows_all) {
    Pace *pace = (Pace *)messages->progress;
    const uint64_t at = (uint64_t)here();
    int near = messages->crowded, lines = 0, known = 1;  // this rank itself
    for (int rank = 0; rank < messages->size; rank++) {
        Line *line = &messages->lines[rank];
        if (!line->rings || !line->rings->words) continue;
        const Rings *rings = line->rings;
        known++;
        lines += look(rings->others + R_THREAD) != rings->words[R_THREAD];
        if (rings->words[R_CORE] != at) show(rings->words + R_CORE, at);
        near |= look(rings->others + R_CORE) == at;
        if (!rings->words[R_ASLEEP]) continue;
        PyObject *done = PyObject_CallMethodNoArgs(line->link, messages->names[STAY_AWAKE]);
        Py_XDECREF(done);
        if (!done) return -1;
    }
    *knows_all = known == messages->size;
    const Waiter waiter = {pace, messages->neighbours, messages->names, has_source, messages};
    return lines && pace->polls ? spin(&waiter, 0, near, 0, HOGGED, pace->due + HELD) : 0;
}

// Send the frames that are held for messages to come, because this rank waits. -1: an error.
static int let_all_go(Messages *messages) {
    if (!PyDict_GET_SIZE(messages->frames)) return 0;
    PyObject *done = PyObject_CallNoArgs(messages->let_all_go);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// The next kind of message of `op` whose array is like `x`. NULL: there is none, or an error.
static const Kind *next_kind(Messages *messages, int *at, PyObject *op, PyObject *x, Leaves *leaves) {
    while (*at < messages->known && !PyErr_Occurred()) {
        const Kind *kind = &messages->kinds[(*at)++];
        const Node *next = kind->node;
        drop_leaves(leaves);
        if (kind->op == op && matches((Starter *)messages, &next, x, leaves)) return kind;
    }
    return NULL;
}

// Whether nothing else goes first to this rank.
static int may_send(const Line *line, const Rings *rings) {
    return line->rings == rings && rings->words && is_set(line, DIRECT) &&
           !PyDict_GET_SIZE(line->waiting) && !PyDict_GET_SIZE(line->stalled) && !PySet_GET_SIZE(line->wants);
}

// Send a message of a known kind. NULL without an error: nothing has happened.
static PyObject *send_known(Messages *messages, PyObject *x, PyObject *dst, PyObject *tag) {
    PyObject *work = NULL, *packed = NULL, *held = NULL, **names = messages->names;
    Leaves leaves = {0};
    Envelope envelope = {0};
    int at = 0;
    Line *line = line_to(messages, dst);
    if (!line || !may_send(line, line->rings) || is_unset(messages->records, names[TRACE_HOOK]) <= 0)
        return NULL;
    Rings *rings = (Rings *)Py_NewRef(line->rings);  // the Python code may forget the line
    const Kind *kind = next_kind(messages, &at, names[SEND], x, &leaves);
    if (!kind || !envelope_for(kind, tag, &envelope)) goto end;
    // First comes all that may run Python code, which could use this link, too.
    if (!may_send(line, rings)) goto end;
    if (number_in(line->used, tag) + envelope.cost > messages->window && is_clear(line)) {
        const long long have = bytes_there(rings);
        if (have > 0 && take_credit(messages, line, have) < 0) goto end;
    }
    // A frame that is held for this rank goes first.
    if (PyDict_GET_SIZE(messages->frames)) {
        held = Py_XNewRef(PyDict_GetItemWithError(messages->frames, dst));
        if (held) packed = PyObject_CallOneArg(messages->packed, dst);
        if (PyErr_Occurred()) goto end;
    }
    // The receiver is awake by the time when much data is there.
    if (envelope.is_pushed && wake_peer(rings, names) < 0) goto end;
    work = make_work((Starter *)messages, names[SEND], tag, Py_None, envelope.data_size);
    if (!work || !may_send(line, rings)) goto unsent;
    if (held && PyDict_GetItemWithError(messages->frames, dst) != held) goto unsent;
    const long long used = number_in(line->used, tag) + envelope.cost;
    const uint32_t id = next_id(line->pushes);
    const Leaf *leaf = &leaves.leaf[0];
    const Py_ssize_t ahead = packed && PyBytes_Check(packed) ? PyBytes_GET_SIZE(packed) : 0;
    const Py_ssize_t first = ahead + envelope.before, whole = first + leaf->nbytes + envelope.after;
    if (PyErr_Occurred() || used > messages->window || (envelope.is_pushed && !id) ||
        line->sends->total + envelope.cost > messages->most)
        goto unsent;
    char *place = place_for(rings, whole);
    if (!place || set_credit(line->used, tag, used) < 0) goto unsent;
    line->sends->total += envelope.cost;
    if (envelope.is_pushed) {
        line->pushes->may_push = 0;
        line->pushes->sid++;
    }
    if (ahead) {
        memcpy(place, PyBytes_AS_STRING(packed), ahead);
        if (PyDict_DelItem(messages->frames, dst) < 0) PyErr_Clear();  // it is there, as we have seen
    }
    write_head(place + ahead, &envelope, id);
    write_end(place + first + leaf->nbytes, &envelope, id);
    rings->sent += envelope.nbytes;
    // The receiver copies what it sees meanwhile, if it has a core.
    const Waiter waiter = {(Pace *)messages->progress, messages->neighbours, names, NULL, NULL};
    const int at_once = envelope.is_pushed && others_compute(&waiter, now());
    for (Py_ssize_t done = 0, shown = 0; shown < whole;) {
        const Py_ssize_t left = leaf->nbytes - done, part = at_once || left < 2 * CHUNK ? left : CHUNK;
        copy_to_shared(place + first + done, leaf->data + done, part);
        done += part;
        const Py_ssize_t upto = done < leaf->nbytes ? first + done : whole;
        show_bytes(rings, upto - shown);
        shown = upto;
    }
    int ended = wake_peer(rings, names);
    if (!ended) ended = end_work((Starter *)messages, work, envelope.text, dst, Py_None, 0);
    if (ended > 0 && line->rings == rings) {
        PyObject *done = PyObject_CallMethodNoArgs(line->link, names[LEAVE_TO_CALL]);
        Py_XDECREF(done);
        if (!done) ended = -1;
    }
    if (ended < 0) Py_CLEAR(work);
end:
    drop_leaves(&leaves);
    drop_envelope(&envelope);
    Py_XDECREF(held);
    Py_XDECREF(packed);
    Py_DECREF(rings);
    return work;
unsent:
    if (work) drop_work((Starter *)messages, &work);
    goto end;
}

// Find the message that comes next among the known kinds. 1: it is one of `kind`, and its data begins
// at `*data`. 0: something else has come. -1: it is not in one piece, or is gone. `id`: of a pushed one.
static int find_message(Messages *messages, const Rings *rings, long long have, PyObject *out,
                        PyObject *tag, uint32_t id, Leaves *leaves, const Kind **kind,
                        Envelope *envelope, char **data) {
    const unsigned long long size = rings->own.len - WORDS_OF_RING;
    const unsigned long long start = (rings->read - rings->peer_origin) % size;
    char *first = (char *)rings->peer.buf + WORDS_OF_RING + start;
    Py_ssize_t room = (Py_ssize_t)(size - start);
    if (room > have) room = (Py_ssize_t)have;
    const unsigned long long read = rings->read;
    int at = 0;
    while ((*kind = next_kind(messages, &at, messages->names[RECV], out, leaves))) {
        PyObject *key, *found, *const template = (*kind)->template;
        Py_ssize_t position = 0;
        if (tag && !envelope_for(*kind, tag, envelope)) return 0;
        while (tag || PyDict_Next((*kind)->template, &position, &key, &found)) {
            if (!tag && !read_envelope(key, found, envelope)) return 0;
            // The Python code may have received it.
            if (!rings->words || rings->read != read || (*kind)->template != template) return -1;
            if (envelope->before <= room && is_head(first, envelope, id)) {
                *data = first + envelope->before;
                const Py_ssize_t nbytes = (*kind)->node[(*kind)->nodes - 1].nbytes;
                return start + envelope->before + nbytes + envelope->after > size ? -1 : 1;
            }
            if (tag) break;
        }
    }
    return 0;
}

// Copy the data of a message as it comes. 1: it is complete. 0: nothing more has come for a while, the
// link has ended, or the message ends in another way. -1: the words of the peer make no sense, or an
// error.
static int copy_message(Messages *messages, Rings *rings, const Envelope *envelope, uint32_t id,
                        const char *data, const Leaf *leaf) {
    Pace *pace = (Pace *)messages->progress;
    const Waiter waiter = {pace, messages->neighbours, messages->names, has_bytes, rings};
    const unsigned long long read = rings->read;
    for (long long copied = 0; rings->words && rings->read == read;) {
        const long long have = bytes_there(rings) - envelope->before;
        const long long upto = have < leaf->nbytes ? have : leaf->nbytes;
        if (upto < copied) return -1;
        copy_plainly(leaf->data + copied, data + copied, upto - copied);
        copied = upto;
        if (have >= leaf->nbytes + envelope->after) return is_end(data + copied, envelope, id);
        const double due = pace->due + HELD;
        const int more = spin(&waiter, envelope->before + have, messages->crowded, 0, HOGGED, due);
        if (more <= 0) return more;
    }
    return 0;
}

// Count a message that was consumed as it came: `Flow.passed`. 0: it is counted. 1: its sender had no
// credit left. -1: an error.
static int count_message(Messages *messages, Line *line, PyObject *src, const Envelope *envelope) {
    Debt *debt = line->receives;
    const long long held = number_in(line->held, envelope->tag), owed = number_in(line->owed, envelope->tag);
    if (held < 0 || owed < 0) return -1;
    const long long cost = envelope->cost;
    int is_owing = PySet_Contains(messages->owing, src);
    // A timer returns what is owed at the end.
    if (!is_owing && !is_unset(messages->flow, messages->names[TIMER]) && !PySet_Add(messages->owing, src))
        is_owing = 1;
    if (PyErr_Occurred()) return -1;
    if (!envelope->is_pushed && is_owing > 0 && held + cost <= messages->window &&
        debt->total + cost <= messages->most && debt->owed + cost < messages->batch) {
        debt->total += cost;
        debt->owed += cost;
        return set_credit(line->held, envelope->tag, held + cost) < 0 ||
                       set_credit(line->owed, envelope->tag, owed + cost) < 0 ? -1 : 0;
    }
    PyObject *number = PyLong_FromLongLong(cost), *done = NULL;
    PyObject *const is_pushed = envelope->is_pushed ? Py_True : Py_False;
    if (number)
        done = PyObject_CallFunctionObjArgs(messages->took, src, envelope->tag, number, is_pushed, NULL);
    const int is_counted = done ? PyObject_IsTrue(done) : -1;
    Py_XDECREF(number);
    Py_XDECREF(done);
    return is_counted < 0 ? -1 : !is_counted;
}

// Receive a message of a known kind. NULL without an error: the Python code decides if `*is_over` is 0.
// If it is 1, this call has waited in vain.
static PyObject *receive_known(Messages *messages, PyObject *src, PyObject *tag, PyObject *out, int *is_over) {
    PyObject *work = NULL, *value = NULL, **names = messages->names;
    Leaves leaves = {0};
    Envelope envelope = {0};
    const Kind *kind;
    char *data = NULL;
    int at = 0;
    // Of two ranks, any rank is the other one.
    const int any = src == messages->any_source, is_pair = any && messages->size == 2;
    PyObject *from = is_pair ? PyLong_FromLong(1 - messages->rank) : Py_NewRef(src);
    Line *line = any && !is_pair ? NULL : line_to(messages, from);
    Rings *rings = line ? (Rings *)Py_NewRef(line->rings) : NULL;  // the Python code may forget the line
    if ((!line && (!any || is_pair)) || is_unset(messages->records, names[TRACE_HOOK]) <= 0) goto end;
    PyObject *const key = tag == messages->any_tag ? NULL : tag;
    if (key && !PyLong_CheckExact(key) && !PyUnicode_CheckExact(key)) goto end;
    if (!next_kind(messages, &at, names[RECV], out, &leaves)) goto end;
    if (is_due((Pace *)messages->progress, names, HELD)) goto end;
    for (int tried = 0; tried < TRIES; tried++) {
        // Others come first: messages that wait, and receives that wait for one.
        if (PyDict_GET_SIZE(messages->boxes) || PyDict_GET_SIZE(messages->receives)) goto end;
        if (any && !is_pair) {
            int rank = next_source(messages);
            if (rank < 0) {
                int knows_all = 0;
                const int has_come = let_all_go(messages) < 0 ? -1 : wait_for_any(messages, &knows_all);
                *is_over = !has_come && knows_all;
                if (has_come <= 0 || (rank = next_source(messages)) < 0) goto end;
            }
            line = &messages->lines[messages->served = rank];
            Py_XSETREF(rings, (Rings *)Py_NewRef(line->rings));
            Py_XSETREF(from, PyLong_FromLong(rank));
        }
        if (!from || line->rings != rings || !rings->words || !is_clear(line)) goto end;
        if (rings->words[R_ASLEEP]) {
            PyObject *done = PyObject_CallMethodNoArgs(line->link, names[STAY_AWAKE]);
            Py_XDECREF(done);
            if (!done) goto end;
        }
        long long have = bytes_there(rings);
        if (!have) {
            if (let_all_go(messages) < 0 || !rings->words) goto end;
            const int has_come = wait_for_bytes(messages, rings, from);
            *is_over = !has_come;
            if (has_come <= 0 || !rings->words) goto end;
            have = bytes_there(rings);
        }
        if (have <= 0 || line->rings != rings) goto end;
        const uint32_t id = next_id(line->comes);
        const unsigned long long read = rings->read;
        const int found = find_message(messages, rings, have, out, key, id, &leaves, &kind, &envelope, &data);
        if (found < 0 || PyErr_Occurred() || line->rings != rings) goto end;
        if (!found) {
            int taken = take_leave(messages, line, have);
            if (!taken) taken = take_credit(messages, line, have);
            if (taken < 0) goto end;
            if (taken) continue;
            goto end;  // the Python code may know it
        }
        // The Python code may make us forget this kind.
        PyObject *finish = Py_NewRef(kind->finish);
        const Node node = kind->node[kind->nodes - 1], *next = &node;
        PyObject *what = Py_NewRef(node.what);
        value = leaves.count ? Py_NewRef(out) : PyObject_CallNoArgs(finish);
        const int is_there = value && (leaves.count || matches((Starter *)messages, &next, value, &leaves));
        Py_DECREF(what);
        const Leaf *leaf = &leaves.leaf[0];
        if (is_there)
            work = make_work((Starter *)messages, names[RECV], envelope.tag, Py_None, envelope.data_size);
        // The Python code could have received the message.
        const int is_next = work && line->rings == rings && rings->words && rings->read == read;
        if (work && (!is_next || copy_message(messages, rings, &envelope, id, data, leaf) <= 0))
            drop_work((Starter *)messages, &work);
        if (work) {
            set_slot((Starter *)messages, work, SOURCE, from);
            rings->received += envelope.nbytes;
            int failed = take_bytes(rings, envelope.before + leaf->nbytes + envelope.after, names);
            if (!failed && line->rings == rings) failed = count_message(messages, line, from, &envelope);
            if (!failed && finish != Py_None && value == out) {
                PyObject *done = PyObject_CallOneArg(finish, value);
                Py_XDECREF(done);
                failed = !done;
            }
            if (failed || end_work((Starter *)messages, work, envelope.text, from, value, 1) < 0)
                Py_CLEAR(work);
        }
        Py_DECREF(finish);
        goto end;
    }
end:
    Py_XDECREF(value);
    drop_leaves(&leaves);
    drop_envelope(&envelope);
    Py_XDECREF(rings);
    Py_XDECREF(from);
    return work;
}

// Call the Python code with the same arguments if the compiled part has done nothing.
static PyObject *or_python(PyObject *work, PyObject *python, PyObject *const *args, Py_ssize_t nargs) {
    return work || PyErr_Occurred() ? work : PyObject_Vectorcall(python, args, nargs, NULL);
}

// send(x, dst, tag)
static PyObject *messages_send(Messages *messages, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *work = nargs == 3 ? send_known(messages, args[0], args[1], args[2]) : NULL;
    return or_python(work, messages->send, args, nargs);
}

// recv(src, tag, out)
static PyObject *messages_recv(Messages *messages, PyObject *const *args, Py_ssize_t nargs) {
    int is_over = 0;
    PyObject *work = nargs == 3 ? receive_known(messages, args[0], args[1], args[2], &is_over) : NULL;
    if (work || PyErr_Occurred() || !is_over) return or_python(work, messages->recv, args, nargs);
    if (PyObject_SetAttr(messages->express, messages->names[IN_VAIN], Py_True) < 0) return NULL;
    Py_RETURN_NONE;
}

// use(rank, link, rings, sends, used, wants, stalled, waiting, pushes, announced, receives, held, owed,
//     comes)
static PyObject *messages_use(Messages *messages, PyObject *args) {
    State *state = state_of(Py_TYPE(messages));
    Line line = {0};
    int rank;
    if (!state ||
        !PyArg_ParseTuple(args, "iOO!O!O!O!O!O!O!O!O!O!O!O!", &rank, &line.link, state->rings,
                          &line.rings, state->debt, &line.sends, &PyDict_Type, &line.used, &PySet_Type,
                          &line.wants, &PyDict_Type, &line.stalled, &PyDict_Type, &line.waiting,
                          state->pushes, &line.pushes, &PyDict_Type, &line.announced, state->debt,
                          &line.receives, &PyDict_Type, &line.held, &PyDict_Type, &line.owed,
                          state->pushes, &line.comes))
        return NULL;
    if (rank < 0 || rank >= messages->size) return PyErr_BadArgument(), NULL;
    for (int flag = 0; flag < FLAGS; flag++)
        if ((line.flags[flag] = slot_of((PyObject *)Py_TYPE(line.link), flag_names[flag])) < 0) return NULL;
    for (const Ref *ref = line_refs; ref->name; ref++) Py_INCREF(*ref_of(&line, ref));
    clear_refs(&messages->lines[rank], line_refs);
    messages->lines[rank] = line;
    Py_RETURN_NONE;
}

// leave(rank)
static PyObject *messages_leave(Messages *messages, PyObject *given) {
    const long rank = PyLong_AsLong(given);
    if (rank >= 0 && rank < messages->size) clear_refs(&messages->lines[rank], line_refs);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static int messages_traverse(Messages *messages, visitproc visit, void *arg) {
    int found = 0;
    for (int rank = 0; messages->lines && !found && rank < messages->size; rank++)
        found = visit_refs(&messages->lines[rank], line_refs, visit, arg);
    if (!found) found = visit_refs(messages, messages_refs, visit, arg);
    return found ? found : visit_starter((Starter *)messages, visit, arg);
}

static int messages_clear(Messages *messages) {
    for (int rank = 0; messages->lines && rank < messages->size; rank++)
        clear_refs(&messages->lines[rank], line_refs);
    Py_CLEAR(messages->send);
    Py_CLEAR(messages->recv);
    Py_CLEAR(messages->packed);
    Py_CLEAR(messages->let_all_go);
    Py_CLEAR(messages->took);
    Py_CLEAR(messages->express);
    return 0;
}

static void messages_dealloc(Messages *messages) {
    PyObject_GC_UnTrack(messages);
    messages_clear(messages);
    PyMem_Free(messages->lines);
    drop_starter((Starter *)messages, messages_refs);
}

static PyObject *messages_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Messages *messages = (Messages *)make_starter(type, messages_refs, args, keywords);
    if (!messages) return NULL;
    const char *const words[] = {"rank", "size", "crowded", "dozes"};
    int *const numbers[] = {&messages->rank, &messages->size, &messages->crowded, &messages->dozes};
    for (int at = 0; at < 4; at++) {
        const long long number = number_from(keywords, words[at]);
        if (PyErr_Occurred()) goto failed;
        *numbers[at] = (int)number;
    }
    messages->window = number_from(keywords, "window");
    if (!PyErr_Occurred()) messages->most = number_from(keywords, "most");
    if (!PyErr_Occurred()) messages->batch = number_from(keywords, "batch");
    if (PyErr_Occurred()) goto failed;
    if (messages->size < 1 || messages->size > 1 << 20 || !PyDict_Check(messages->frames) ||
        !PyDict_Check(messages->boxes) || !PyDict_Check(messages->receives) ||
        !PyDict_Check(messages->credits) || !PySet_Check(messages->owing) ||
        !PyBytes_Check(messages->leave)) {
        messages->size = 0;
        PyErr_SetString(PyExc_TypeError, "messages are made of other things");
        goto failed;
    }
    messages->lines = PyMem_Calloc(messages->size, sizeof(Line));
    if (messages->lines) return (PyObject *)messages;
    PyErr_NoMemory();
failed:
    Py_DECREF(messages);
    return NULL;
}

static PyMethodDef messages_methods[] = {
    {"send", (PyCFunction)(void (*)(void))messages_send, METH_FASTCALL,
     "send(x, dst, tag)\n--\n\nSend an array: see `P2PExpress.send`."},
    {"recv", (PyCFunction)(void (*)(void))messages_recv, METH_FASTCALL,
     "recv(src, tag, out)\n--\n\nReceive an array that comes next: see `P2PExpress.recv`."},
    {"use", (PyCFunction)messages_use, METH_VARARGS,
     "use(rank, link, rings, sends, used, wants, stalled, waiting, pushes, announced, receives, held,"
     " owed, comes)\n--\n\n"
     "Send to a rank, and receive from it, over this link."},
    {"leave", (PyCFunction)messages_leave, METH_O, "leave(rank)\n--\n\nForget the link to a rank."},
    {"know", (PyCFunction)starter_know, METH_VARARGS,
     "know(op, recipe, args, result, is_apart, template, finish)\n--\n\nKnow such messages from now"
     " on, and say whether that is possible."},
    {0},
};
static PyType_Slot messages_slots[] = {
    {Py_tp_new, messages_new},
    {Py_tp_dealloc, messages_dealloc},
    {Py_tp_traverse, messages_traverse},
    {Py_tp_clear, messages_clear},
    {Py_tp_methods, messages_methods},
    {Py_tp_doc, "Sends and receives arrays over shared memory: see aiodist.p2p.express."},
    {0, NULL},
};
static PyType_Spec messages_spec = {
    .name = "aiodist._core.Messages",
    .basicsize = sizeof(Messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = messages_slots,
};

// ---- the running loop ---------------------------------------------------------------------------

// `asyncio._get_running_loop` of Python 3.11 asks the system for the process each time, which takes
// longer than the rest of a call. It keeps the loop in an object that each thread has anew for each
// run of a loop, so as long as a thread has the same object, it runs the same loop. A child of a fork
// has this object, too, but runs no loop, so it asks again: see `forget_running_loop`.
static PyObject *running_loop(PyObject *self, PyObject *nothing) {
    State *state = PyModule_GetState(self);
    PyObject *thread = PyThreadState_GetDict();
    PyObject *found = thread ? PyDict_GetItemWithError(thread, state->names[RUNNING]) : NULL;
    if (found && found == state->running) return Py_NewRef(state->loop);
    if (PyErr_Occurred()) return NULL;
    Py_XINCREF(found);
    PyObject *loop = PyObject_CallNoArgs(state->get_running_loop);
    if (loop && found) {
        Py_XSETREF(state->running, Py_NewRef(found));
        Py_XSETREF(state->loop, Py_NewRef(loop));
    }
    Py_XDECREF(found);
    return loop;
}

static PyObject *forget_running_loop(PyObject *self, PyObject *nothing) {
    State *state = PyModule_GetState(self);
    Py_CLEAR(state->running);
    Py_CLEAR(state->loop);
    Py_RETURN_NONE;
}

// ---- looking at a Work --------------------------------------------------------------------------

// `UnseenWork.__await__`: make it an ordinary Work, and await that. The classes differ in nothing but
// methods, so its memory stays as it is.
static PyObject *await_unseen(PyObject *work) {
    PyTypeObject *unseen = Py_TYPE(work), *ordinary = unseen->tp_base;
    Py_SET_TYPE(work, (PyTypeObject *)Py_NewRef((PyObject *)ordinary));
    Py_DECREF(unseen);
    return ordinary->tp_as_async->am_await(work);
}

static PyObject *await_natively(PyObject *self, PyObject *unseen) {
    PyTypeObject *type = (PyTypeObject *)unseen;
    if (!PyType_Check(unseen) || !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) ||
        type->tp_basicsize != type->tp_base->tp_basicsize) {
        PyErr_SetString(PyExc_TypeError, "expected a class that adds methods alone to its base");
        return NULL;
    }
    type->tp_as_async->am_await = await_unseen;
    Py_RETURN_NONE;
}

// ---- the module ---------------------------------------------------------------------------------

// copy_to_shared(into, data, streaming=False)
static PyObject *copy_shared(PyObject *self, PyObject *args) {
    Py_buffer into, data;
    int streaming = 0;
    if (!PyArg_ParseTuple(args, "w*y*|p:copy_to_shared", &into, &data, &streaming)) return NULL;
    void (*const copy)(char *, const char *, size_t) = streaming ? stream : copy_to_shared;
    const int is_wrong = into.len != data.len;
    if (is_wrong) {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", data.len, into.len);
    } else if (data.len < ALONE) {
        copy(into.buf, data.buf, data.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy(into.buf, data.buf, data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&data);
    if (is_wrong) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"write_value", write_value, METH_VARARGS,
     "write_value(value, most=..., other=None)\n--\n\nReturn the metadata of a plain value: None, bool, int,"
     " float, str, bytes, list, tuple, dict. None: it is not plain, or takes more bytes. `other` makes"
     " a token or a plain object of any other leaf."},
    {"read_value", read_value, METH_VARARGS,
     "read_value(meta, other=None)\n--\n\nReturn the plain value of this metadata. NotImplemented: it is not"
     " plain, or not sound. `other` reads its other extensions."},
    {"copy_to_shared", copy_shared, METH_VARARGS,
     "copy_to_shared(into, data, streaming=False)\n--\n\nCopy bytes to memory that another process"
     " reads, with streaming stores or what is faster."},
    {"await_natively", await_natively, METH_O,
     "await_natively(cls)\n--\n\nAwait instances of `UnseenWork` without a call of Python."},
    {"differ", differ, METH_VARARGS,
     "differ(old, new, gaps, values)\n--\n\nWrite the gaps and values of what has changed, and return how"
     " many there are of both; None if there is no room."},
    {"find", find, METH_VARARGS,
     "find(op, dtype)\n--\n\nReturn the number of a kernel, or None if there is none."},
    {"forget_running_loop", forget_running_loop, METH_NOARGS,
     "forget_running_loop()\n--\n\nAsk asyncio at the next call of `running_loop`."},
    {"running_loop", running_loop, METH_NOARGS,
     "running_loop()\n--\n\nReturn the loop that runs in this thread, or None."},
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL,
     "reduce(kernel, operands, out, size)\n--\n\nReduce contiguous arrays of `size` ranks into `out`."},
    {0},
};

static int begin(PyObject *module) {
    State *state = PyModule_GetState(module);
    for (int i = 0; i < NAMES; i++)
        if (!(state->names[i] = PyUnicode_InternFromString(names[i]))) return -1;
    PyObject *numpy = PyImport_ImportModule("numpy");
    state->ndarray = numpy ? PyObject_GetAttrString(numpy, "ndarray") : NULL;
    Py_XDECREF(numpy);
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    state->get_running_loop = asyncio ? PyObject_GetAttrString(asyncio, "_get_running_loop") : NULL;
    Py_XDECREF(asyncio);
    if (!state->ndarray || !state->get_running_loop) return -1;
    // The bases come first.
    PyType_Spec *const specs[] = {&counts_spec, &naps_spec,  &pace_spec,  &row_spec,
                                  &ring_spec,   &cursor_spec, &rings_spec, &debt_spec,
                                  &pushes_spec, &tape_spec,   &caller_spec, &messages_spec};
    PyTypeObject **const kept[] = {&state->counts, &state->naps,  &state->pace,  &state->row,
                                   &state->ring,   &state->cursor, &state->rings, &state->debt,
                                   &state->pushes, &state->tape,   NULL,          NULL};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *base = specs[i] == &ring_spec ? (PyObject *)state->naps : NULL;
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], base);
        const int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
        if (!failed && kept[i]) *kept[i] = (PyTypeObject *)Py_NewRef(type);
        Py_XDECREF(type);
        if (failed) return -1;
    }
    if (PyModule_AddIntConstant(module, "LEAVES", LEAVES) < 0) return -1;
    return PyModule_AddIntConstant(module, "LAYOUT", LAYOUT);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->counts);
    Py_VISIT(state->naps);
    Py_VISIT(state->pace);
    Py_VISIT(state->row);
    Py_VISIT(state->tape);
    Py_VISIT(state->ring);
    Py_VISIT(state->cursor);
    Py_VISIT(state->rings);
    Py_VISIT(state->debt);
    Py_VISIT(state->pushes);
    Py_VISIT(state->ndarray);
    Py_VISIT(state->get_running_loop);
    Py_VISIT(state->running);
    Py_VISIT(state->loop);
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->counts);
    Py_CLEAR(state->naps);
    Py_CLEAR(state->pace);
    Py_CLEAR(state->row);
    Py_CLEAR(state->tape);
    Py_CLEAR(state->ring);
    Py_CLEAR(state->cursor);
    Py_CLEAR(state->rings);
    Py_CLEAR(state->debt);
    Py_CLEAR(state->pushes);
    Py_CLEAR(state->ndarray);
    Py_CLEAR(state->get_running_loop);
    Py_CLEAR(state->running);
    Py_CLEAR(state->loop);
    for (int i = 0; i < NAMES; i++) Py_CLEAR(state->names[i]);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, begin},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,       .m_name = "aiodist._core",
    .m_size = sizeof(State),     .m_methods = methods,
    .m_slots = slots,            .m_traverse = module_traverse,
    .m_clear = module_clear,     .m_free = module_free};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
