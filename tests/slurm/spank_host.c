/* Stands for sbatch in tests of the SPANK plug-in: takes "option value" lines, and prints what each one came to, then
   the variables that the plug-in sets. */

#include <slurm/spank.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

extern int slurm_spank_init(spank_t spank, int count, char **arguments);
extern int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments);

static struct spank_option options[64];
static char names[64][64];
static int count;

spank_context_t spank_context(void) { return S_CTX_ALLOCATOR; }

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
    (void)spank;
    options[count] = *option;
    snprintf(names[count++], sizeof *names, "%s", option->name);
    return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
    (void)spank, (void)overwrite;
    printf("%s=%s\n", name, value);
    return ESPANK_SUCCESS;
}

const char *spank_strerror(spank_err_t error) { return error ? "error" : ""; }

void slurm_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

int main(void)
{
    static char line[1 << 16];
    slurm_spank_init(NULL, 0, NULL);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        char *value = strchr(line, ' ');
        *value++ = '\0';
        for (int at = 0; at < count; at++)
            if (strcmp(names[at], line) == 0 && options[at].cb(options[at].val, value, 0) == ESPANK_SUCCESS)
                puts("ok");
    }
    slurm_spank_init_post_opt(NULL, 0, NULL);
    return 0;
}
