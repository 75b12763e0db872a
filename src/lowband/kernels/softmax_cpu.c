/* Softmax of one vector in fp32, by the three algorithms of arXiv 2001.04438 (Dukhan and Ablavatski), and
 * plain passes over memory for comparison. One source for two widths: -DLANES=8 (AVX2 and FMA) and
 * -DLANES=16 (AVX-512F).
 *
 *   y_i = e^(x_i) / sum_j e^(x_j),   e^x = m 2^n,   n = round(x / ln 2),   m = e^(x - n ln 2) in [0.70, 1.42]
 *
 * A pass works in blocks of UNROLL vectors; the last block is padded with -inf, whose e^x is 0. Sums are kept
 * per lane over at most CHUNK values and then in double, so that a sum of a hundred million values keeps its
 * precision. Results below the smallest normal number are 0 (denormals are flushed): some processors take
 * 150 cycles for one.
 *
 * A NaN, a +inf, or nothing but -inf gives NaN everywhere, as torch.softmax does; another -inf gives 0.
 */
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if LANES == 16
typedef __m512 vec;
#define V(operation) _mm512_##operation##_ps
#define ROUND(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#else
typedef __m256 vec;
#define V(operation) _mm256_##operation##_ps
#define ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#endif

#define UNROLL 4
#define BLOCK (UNROLL * LANES)
#define CHUNK 8192
#define AHEAD 2048 /* bytes */
#define EACH _Pragma("GCC unroll 8") for (int k = 0; k < UNROLL; k++)
#define INLINE static inline __attribute__((always_inline))

/* e^x as m and n, by two steps of Cody and Waite and a polynomial of degree 5: minimax in relative error on
 * [-ln 2 / 2, ln 2 / 2], constant term 1, the coefficients rounded to fp32 one by one and the others fitted
 * again: 9.2e-8 off at most. x below the floor counts as the floor; a NaN stays. */
INLINE vec exp_parts(vec x, vec floor, vec *n)
{
    x = V(max)(floor, x); /* if one operand is a NaN, the result is the second operand */
    *n = ROUND(x * V(set1)(0x1.715476p+0f));
    vec t = V(fmadd)(*n, V(set1)(-0x1.62e430p-1f), x);
    t = V(fmadd)(*n, V(set1)(0x1.05c610p-29f), t);
    vec m = V(fmadd)(t, V(set1)(0x1.0fa31ap-7f), V(set1)(0x1.573a1cp-5f));
    m = V(fmadd)(t, m, V(set1)(0x1.555a7ap-3f));
    m = V(fmadd)(t, m, V(set1)(0x1.fffdc6p-2f));
    m = V(fmadd)(t, m, V(set1)(0x1.fffff6p-1f));
    return V(fmadd)(t, m, V(set1)(1.0f));
}

/* 2^(n - base) for whole numbers with -127 <= n - base <= 127, where -127 gives 0. */
INLINE vec power(vec n, vec base)
{
#if LANES == 16
    return V(scalef)(V(set1)(1.0f), n - base);
#else
    /* 1.5 2^23 + 127 puts n - base + 127, the exponent's bits, at the end of the sum's mantissa. */
    vec biased = n + (V(set1)(0x1.8000fep+23f) - base);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(biased), 23));
#endif
}

/* 2^(n - base) for any whole n <= base: 0 if n is far below. */
INLINE vec power_far(vec n, vec base)
{
#if LANES == 16
    return power(n, base);
#else
    return power(V(max)(n, base - V(set1)(127.0f)), base);
#endif
}

#define LN2 0x1.62e430p-1f
#define N_LIMIT 0x1p+16f                    /* beyond, round(x / ln 2) is often not the nearest n */
#define N_FLOOR (-1.25f * N_LIMIT)          /* stands for -inf where x has not been shifted */
#define SHIFTED_FLOOR (-127.0f * LN2)       /* e^x is 0 */

/* A pass: a function of one block and the pass's state, called for every block of a vector. */
typedef void reading(const float *x, void *state);
typedef void writing(const float *x, float *y, void *state);

/* Prefetches the input of a later block: between loads that wait for arithmetic the processor's own
 * prefetching falls behind (docs/softmax-cpu.md). */
INLINE void prefetch(const float *x)
{
    for (size_t byte = 0; byte < BLOCK * sizeof *x; byte += 64)
        _mm_prefetch((const char *)((uintptr_t)x + AHEAD + byte), _MM_HINT_T0); /* may be beyond the end */
}

INLINE void pad(float *block, const float *x, size_t count)
{
    memcpy(block, x, count * sizeof *x);
    for (size_t i = count; i < BLOCK; i++)
        block[i] = -INFINITY;
}

INLINE void read_blocks(reading *pass, const float *x, size_t n, void *state)
{
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        pass(x + i, state);
    if (i < n) {
        float last[BLOCK];
        pad(last, x + i, n - i);
        pass(last, state);
    }
}

INLINE void write_blocks(writing *pass, const float *x, float *y, size_t n, void *state)
{
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        pass(x + i, y + i, state);
    if (i < n) {
        float last[BLOCK], written[BLOCK];
        pad(last, x + i, n - i);
        pass(last, written, state);
        memcpy(y + i, written, (n - i) * sizeof *y);
    }
}

INLINE double lane_sum(vec v)
{
    float lanes[LANES];
    V(storeu)(lanes, v);
    double sum = 0;
    for (int k = 0; k < LANES; k++)
        sum += lanes[k];
    return sum;
}

/* ---- largest value: 1 vector operation per LANES values ---- */

typedef struct { vec top[UNROLL]; } largest;

INLINE void max_block(const float *x, void *state)
{
    largest *s = state;
    EACH s->top[k] = V(max)(s->top[k], V(loadu)(x + k * LANES));
}

static float max_pass(const float *x, size_t n)
{
    largest s;
    EACH s.top[k] = V(set1)(-INFINITY);
    read_blocks(max_block, x, n, &s);
    float lanes[BLOCK], top = -INFINITY;
    EACH V(storeu)(lanes + k * LANES, s.top[k]);
    for (int k = 0; k < BLOCK; k++)
        top = lanes[k] > top ? lanes[k] : top; /* may lose a NaN, which the sum then keeps */
    return top;
}

/* ---- three passes: e^(x - max), its sum, and the scaled output ---- */

typedef struct { vec max, scale, sum; } shifted;

INLINE vec shifted_exp(const float *x, const shifted *s)
{
    vec n, m = exp_parts(V(loadu)(x) - s->max, V(set1)(SHIFTED_FLOOR), &n);
    return m * power(n, V(set1)(0.0f));
}

INLINE void add_block(const float *x, void *state)
{
    prefetch(x);
    shifted *s = state;
    vec sum = V(set1)(0.0f);
    EACH sum += shifted_exp(x + k * LANES, s);
    s->sum += sum;
}

INLINE void add_store_block(const float *x, float *y, void *state)
{
    prefetch(x);
    shifted *s = state;
    vec sum = V(set1)(0.0f);
    EACH {
        vec e = shifted_exp(x + k * LANES, s);
        V(storeu)(y + k * LANES, e);
        sum += e;
    }
    s->sum += sum;
}

INLINE void scale_exp_block(const float *x, float *y, void *state)
{
    prefetch(x);
    EACH V(storeu)(y + k * LANES, shifted_exp(x + k * LANES, state) * ((shifted *)state)->scale);
}

INLINE void scale_block(const float *x, float *y, void *state)
{
    EACH V(storeu)(y + k * LANES, V(loadu)(x + k * LANES) * ((shifted *)state)->scale);
}

static void three_pass_recompute(const float *x, float *y, size_t n)
{
    shifted s = {.max = V(set1)(max_pass(x, n))};
    double sum = 0;
    for (size_t i = 0; i < n; i += CHUNK) {
        s.sum = V(set1)(0.0f);
        read_blocks(add_block, x + i, n - i < CHUNK ? n - i : CHUNK, &s);
        sum += lane_sum(s.sum);
    }
    s.scale = V(set1)((float)(1 / sum));
    write_blocks(scale_exp_block, x, y, n, &s);
}

static void three_pass_reload(const float *x, float *y, size_t n)
{
    shifted s = {.max = V(set1)(max_pass(x, n))};
    double sum = 0;
    for (size_t i = 0; i < n; i += CHUNK) {
        s.sum = V(set1)(0.0f);
        write_blocks(add_store_block, x + i, y + i, n - i < CHUNK ? n - i : CHUNK, &s);
        sum += lane_sum(s.sum);
    }
    s.scale = V(set1)((float)(1 / sum));
    write_blocks(scale_block, y, y, n, &s);
}

/* ---- two passes: the sum of pairs (m, n), each m 2^n, and the output scaled by it ---- */

typedef struct { vec m, n; } pairs;
typedef struct { vec scale, n; } scaled;

/* The sum's exponent is the largest of its terms', so that no term grows. A block's terms are brought to one
 * exponent and added first: one rescaling of the sum for UNROLL vectors, and one dependent step. */
INLINE void add_pairs_block(const float *x, void *state)
{
    prefetch(x);
    pairs *s = state;
    vec m[UNROLL], n[UNROLL], top = s->n;
    EACH m[k] = exp_parts(V(loadu)(x + k * LANES), V(set1)(N_FLOOR * LN2), &n[k]);
    EACH top = V(max)(top, n[k]);
    vec sum = m[0] * power_far(n[0], top);
    for (int k = 1; k < UNROLL; k++)
        sum = V(fmadd)(m[k], power_far(n[k], top), sum);
    s->m = V(fmadd)(s->m, power_far(s->n, top), sum);
    s->n = top;
}

INLINE void scale_pairs_block(const float *x, float *y, void *state)
{
    prefetch(x);
    const scaled *s = state;
    vec floor = (s->n - V(set1)(127.0f)) * V(set1)(LN2);
    EACH {
        vec n, m = exp_parts(V(loadu)(x + k * LANES), floor, &n);
        V(storeu)(y + k * LANES, m * s->scale * power(n, s->n));
    }
}

/* Adds the lanes of a chunk's sum to m 2^n. */
static void add_lanes(const pairs *s, double *m, double *n)
{
    float ms[LANES], ns[LANES];
    double top = *n, sum = 0;
    V(storeu)(ms, s->m);
    V(storeu)(ns, s->n);
    for (int k = 0; k < LANES; k++)
        top = ns[k] > top ? ns[k] : top;
    for (int k = 0; k < LANES; k++)
        sum += ms[k] * exp2(ns[k] - top);
    *m = *m * exp2(*n - top) + sum;
    *n = top;
}

static void two_pass(const float *x, float *y, size_t n)
{
    double sum_m = 0, sum_n = -INFINITY;
    for (size_t i = 0; i < n; i += CHUNK) {
        pairs s = {V(set1)(0.0f), V(set1)(N_FLOOR)};
        read_blocks(add_pairs_block, x + i, n - i < CHUNK ? n - i : CHUNK, &s);
        add_lanes(&s, &sum_m, &sum_n);
    }
    /* Input that pairs cannot represent exactly (+inf, NaN, nothing but -inf, huge) is shifted first. */
    if (!(fabs(sum_n) < N_LIMIT && isfinite(sum_m))) {
        three_pass_recompute(x, y, n);
        return;
    }
    scaled s = {V(set1)((float)(1 / sum_m)), V(set1)((float)sum_n)};
    write_blocks(scale_pairs_block, x, y, n, &s);
}

/* ---- exported functions ---- */

#define FLUSH_DENORMALS 0x8000u

/* Runs one algorithm, x to y, n fp32 values each. */
#define EXPORT(name)                                               \
    void softmax_##name(const float *x, float *y, size_t n)        \
    {                                                              \
        unsigned mode = _mm_getcsr();                              \
        _mm_setcsr(mode | FLUSH_DENORMALS);                        \
        name(x, y, n);                                             \
        _mm_setcsr(mode);                                          \
    }

/* Passes over memory with negligible arithmetic: lower bounds for the times of the algorithms' passes. */
static void read_pass(const float *x, float *y, size_t n) { y[0] = max_pass(x, n); }

static void scale_pass(const float *x, float *y, size_t n)
{
    shifted s = {.scale = V(set1)(0.5f)};
    write_blocks(scale_block, x, y, n, &s);
}

static void scale_in_place_pass(const float *x, float *y, size_t n)
{
    (void)x;
    scale_pass(y, y, n);
}

EXPORT(two_pass)
EXPORT(three_pass_recompute)
EXPORT(three_pass_reload)
EXPORT(read_pass)
EXPORT(scale_pass)
EXPORT(scale_in_place_pass)

/* Seconds that one call takes, after x has been read once: it is in the caches as far as it fits. */
double softmax_seconds(void (*call)(const float *, float *, size_t), const float *x, float *y, size_t n)
{
    struct timespec start, end;
    volatile float read = max_pass(x, n);
    (void)read;
    clock_gettime(CLOCK_MONOTONIC, &start);
    call(x, y, n);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}
