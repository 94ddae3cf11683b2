-- Keeps the options that dl2d's SPANK plug-in adds to sbatch in the job's AdminComment, as one #DL2 line.
--
-- slurmctld runs this for each job. An AdminComment keeps what was given at submission, so the daemon reads it there:
-- slurmctld refuses users' changes of it, and this script refuses #DL2 in one that comes with a user's job (sbatch has no
-- option for it, but Slurm's API has a field). A site with a job_submit.lua of its own loads this file in it, and calls
-- the two functions.

local MAX_VALUE = 256
local MAX_LINE = 4096

local function refuse(text)
   slurm.log_user("%s", text)
   return slurm.ERROR
end

-- At submission; returns slurm.SUCCESS. Returns slurm.ERROR for #DL2 in a user's own AdminComment, for a value that is
-- too long or has characters that no option has, and for a line that is too long. What values mean is not checked here.
function dl2d_job_submit(job_desc, part_list, submit_uid)
   local before = job_desc.admin_comment or ""
   if submit_uid ~= 0 and before:find("#DL2", 1, true) then
      return refuse("#DL2 in an AdminComment: give options of dl2d to sbatch, or write them into the script")
   end
   local environment, words, at = job_desc.spank_job_env or {}, {}, 0
   while environment[at] do
      local key, value = environment[at]:match("^DL2_([A-Z_]+)=(.*)$")
      if key then
         if #value > MAX_VALUE or not value:match("^[%w_.,:+/-]+$") then
            return refuse("the value of an option of dl2d is too long, or has characters that it cannot have")
         end
         words[#words + 1] = key:lower() .. "=" .. value
      end
      at = at + 1
   end
   if #words == 0 then
      return slurm.SUCCESS
   end
   local line = "#DL2 " .. table.concat(words, " ")
   if #line > MAX_LINE then
      return refuse("the options of dl2d are longer than " .. MAX_LINE .. " characters together")
   end
   job_desc.admin_comment = before == "" and line or before .. "\n" .. line
   return slurm.SUCCESS
end

-- At a change of a job: users do not change the tags of dl2d's tasks. Slurm itself refuses a changed AdminComment.
function dl2d_job_modify(job_desc, job_ptr, part_list, modify_uid)
   if modify_uid ~= 0 and job_desc.comment and (job_ptr.comment or ""):match("^dl2:[^:]+:.") then
      return refuse("the comment of a task of dl2d is the tag by which its daemon finds it, and stays as it is")
   end
   return slurm.SUCCESS
end

slurm_job_submit = slurm_job_submit or dl2d_job_submit
slurm_job_modify = slurm_job_modify or dl2d_job_modify

return slurm.SUCCESS
